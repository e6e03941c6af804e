"""Workers in virtual time: the production schedulers over modelled steps and transfers."""
