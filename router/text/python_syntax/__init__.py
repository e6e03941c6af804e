"""Values and calls as Python writes them: read without running anything, and as rules of a grammar."""
