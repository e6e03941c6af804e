"""Who may ask, what for and how much: keys, limits, TLS, the audit log."""
