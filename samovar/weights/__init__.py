"""Checkpoint files -> tensors of a bound model: reading, dequantizing, the plan of copies and its execution."""
