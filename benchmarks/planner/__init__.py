"""`python -m benchmarks.planner`: pools under the planner, simpler rules and a clairvoyant, in virtual time."""
