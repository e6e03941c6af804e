"""What outlives a request: responses and their conversations, in SQLite. Nothing here knows of HTTP."""
