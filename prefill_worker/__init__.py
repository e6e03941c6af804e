"""Computes the KV cache of prompts, ships it, and samples first tokens."""
