"""The workers that a router knows: connections, signs of life, and what each may be given."""
