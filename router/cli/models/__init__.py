"""Commands for models on this machine."""
