"""The vocabulary of the engine: requests, sequences, steps, outputs, events. Torch-free; imports nothing above it."""
