"""LoRA adapters on a worker: read from disk, checked against the base model, held in its places."""
