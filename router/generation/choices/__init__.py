"""The choices of an answer as they grow: text, log-probabilities, and one record of the request's life."""
