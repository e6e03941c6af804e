"""The forms in which models write calls of functions: one file each, and what they share."""
