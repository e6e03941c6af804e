"""GGUF files: metadata, tensors, the tokenizer inside. No torch."""
