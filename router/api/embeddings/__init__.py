"""Answers of prompts alone: embeddings, and scores of pairs of texts."""
