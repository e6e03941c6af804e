"""Draft tokens from a second, smaller model."""
