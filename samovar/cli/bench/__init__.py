"""`samovar bench`: what it takes to start, to answer one batch, to work through many prompts, and to serve a load."""
