"""Logits -> tokens and their logprobs, for a whole batch at a time."""
