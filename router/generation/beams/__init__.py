"""Beam search: pure choice of beams, and a source of tokens that asks the pools for one token of each."""
