"""Products of one token with the weights of its experts, each pair for itself."""
