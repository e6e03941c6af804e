"""What is asked of the pools: arrivals, lengths, cached tokens, answers."""
