"""`python -m benchmarks.alternating`: fixed splits beside changing roles, under a load that alternates."""
