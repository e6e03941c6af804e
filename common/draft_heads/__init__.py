"""Draft heads, which read the served model's hidden states: found on disk, loaded, and run beside it."""
