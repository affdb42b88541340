"""Policy of the engine: who runs, how many tokens, with which cache blocks. Integers in, integers out.

Pure Python over plain records: no tensors, no clock but an argument, no third-party import.
"""
