"""How many workers each pool should have: from the offered load and the goals, by predicted waiting."""
