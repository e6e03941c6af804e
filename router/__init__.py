"""The HTTP front door: takes requests, chooses workers, and streams answers. Never imports torch."""
