"""What only workers load: models and their weights, the KV cache and its transfer, steps, and the worker process."""
