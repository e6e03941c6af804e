"""Runs the steps of a model: plainly, as a recorded graph, or on a thread of their own."""
