"""Finds workers, which come and go."""
