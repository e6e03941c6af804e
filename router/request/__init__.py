"""What clients send: bodies, fields, and the errors that they get."""
