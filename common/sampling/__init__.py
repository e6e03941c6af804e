"""From logits to tokens: penalties, log-probabilities, and when a sequence ends."""
