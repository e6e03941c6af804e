"""A model on disk: found, fetched, described and tokenised, without torch."""
