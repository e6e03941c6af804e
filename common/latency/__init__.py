"""How long steps take: one model, which workers fit to their own steps, and everybody else predicts with. Pure."""
