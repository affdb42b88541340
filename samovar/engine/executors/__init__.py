"""Executors: where the workers live (this process; later: others, or other machines)."""
