"""The whole service in virtual time: production routers and schedulers over modelled steps, links and messages.

scenario (file) -> load (requests) -> simulation: routers, workers, network, all on one clock -> result (table, JSON)
"""
