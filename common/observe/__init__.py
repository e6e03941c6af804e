"""Logs, and quantiles of what was observed lately."""
