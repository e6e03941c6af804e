"""The HTTP server: connections, their bounds, and what every request passes first."""
