"""What the router measures of itself and of the pools."""
