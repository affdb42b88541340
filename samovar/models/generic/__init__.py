"""The generic path: a decoder of Transformers, with its attention, linears, experts and weights exchanged for ours.

What Transformers keeps is the mathematics between them. Nothing here is imported before such a model is loaded.
"""
