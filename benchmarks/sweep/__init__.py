"""Plans beside sweeps of real clusters."""
