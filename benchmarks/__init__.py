"""Measurements, and the load generator."""
