"""Which pairs of token and expert are computed together, and the sum of what came of them."""
