"""Where KV blocks go that fall out of a worker's memory, and from where they come back."""
