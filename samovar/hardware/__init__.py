"""What the machine offers, and whether a model fits into it."""
