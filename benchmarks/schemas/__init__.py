"""JSON schemas of a corpus: how many are served, whether answers match them, and what that costs."""
