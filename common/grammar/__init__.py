"""Answers that must match a grammar: compiled within bounds, and followed token by token."""
