"""A request inside the router: its prompt, its state, and the token stream that its workers make of it."""
