"""`samovar eval`: what a format costs in quality: perplexity, divergence, answered questions, found needles."""
