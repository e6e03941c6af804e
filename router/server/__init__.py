"""The HTTP server: connections, their bounds, and the checks that every request passes first."""
