"""Decoders in torch: families, weights, and the tensors of a step."""
