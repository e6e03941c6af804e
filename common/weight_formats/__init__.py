"""How checkpoints of safetensors hold quantised matrices: one layout a file."""
