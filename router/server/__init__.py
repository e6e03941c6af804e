"""The HTTP server: connections, their limits, and the checks that precede every request."""
