"""Between text and tokens: conversations, calls, thoughts, stop strings, detokenizing."""
