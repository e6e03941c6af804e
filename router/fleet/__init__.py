"""The router's workers: connections, signs of life, and the load of each."""
