"""Where workers are found, while they come and go."""
