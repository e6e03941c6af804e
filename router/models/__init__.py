"""Which models a router serves, under which names, and which of them a request gets."""
