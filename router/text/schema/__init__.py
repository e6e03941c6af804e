"""JSON schemas, rewritten so that llguidance enforces all that they say, or refused with the place that it cannot."""
