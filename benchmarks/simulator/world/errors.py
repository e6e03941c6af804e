"""What ends a simulation that went wrong."""


class ConservationError(Exception):
    """A simulation's books do not balance: a bug in the simulator, or in what it simulates."""
