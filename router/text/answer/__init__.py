"""What an answer is made of: its parts, its marks, and grammars of its form."""
