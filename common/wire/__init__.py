"""What crosses process borders: messages, sampling parameters, and the sockets and keys that carry them."""
