"""What clients send, and the errors that they get."""
