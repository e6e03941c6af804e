"""The load of the pools: arrivals, lengths, cached tokens, answers."""
