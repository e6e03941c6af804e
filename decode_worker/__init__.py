"""Generates tokens in continuous batches over KV that prefill workers shipped."""
