"""Attention backends under three verbs: accepts, plan (once per step), run (once per layer)."""
