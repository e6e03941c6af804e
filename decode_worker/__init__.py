"""Decode worker: generates tokens in continuous batches from KV that prefill workers have sent."""
