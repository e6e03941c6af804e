"""The simulated world: clock, network and load of a scenario, and the cost of its steps."""
