"""From text to tokens and back: conversations, calls, thoughts, stop strings, detokenizing."""
