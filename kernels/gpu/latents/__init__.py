"""Attention over latents, and their write into the cache, in Triton."""
