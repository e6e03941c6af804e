"""Draft tokens: found in the text, or computed by a smaller model or a draft head; how many, and when."""
