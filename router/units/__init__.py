"""Files that keep a service of a few machines running without Kubernetes: systemd units, compose files."""
