"""Access to the service: keys, limits, TLS, the audit log."""
