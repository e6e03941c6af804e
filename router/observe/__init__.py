"""What the router measures: of itself, of its requests, and of the pools."""
