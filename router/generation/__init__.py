"""From a checked request to the pieces of its answer, for every API."""
