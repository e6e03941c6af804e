"""From a checked request to the pieces of its answer, whichever API asked."""
