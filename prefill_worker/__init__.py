"""Prefill worker: computes the KV cache of prompts, sends it to decode workers, and samples first tokens."""
