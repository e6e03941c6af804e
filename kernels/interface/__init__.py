"""What callers and all backends agree on: the operations, and the data that they take."""
