"""Logs; averages, windows and quantiles of recent observations."""
