"""Draft tokens from the text, a draft model or a draft head, and the choice of how many and when."""
