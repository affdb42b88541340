"""A bound model as one list of instructions for the CPU library."""

from samovar.layers.lower.body import Body, CannotLower, lower, matrices_of, norm_instruction, weight_of
from samovar.layers.lower.program import Instruction, Program, Value, padded

__all__ = [
    "Body",
    "CannotLower",
    "Instruction",
    "Program",
    "Value",
    "lower",
    "matrices_of",
    "norm_instruction",
    "padded",
    "weight_of",
]
