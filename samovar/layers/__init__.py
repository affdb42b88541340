"""The parts that model files are made of."""

from samovar.layers.attention import Attention
from samovar.layers.batch import ForwardBatch
from samovar.layers.embedding import Embedding, LMHead
from samovar.layers.layer import Layer, Placement, Source, bind
from samovar.layers.linear import ColumnLinear, Linear, QKVLinear, RowLinear
from samovar.layers.mlp import GatedActivation, GatedMLP
from samovar.layers.moe import Experts, ExpertStorage, Router, Routing, SharedGate, SparseMLP
from samovar.layers.norm import AddRMSNorm, HeadsRMSNorm, RMSNorm
from samovar.layers.rope import Rope, RopeParameters

__all__ = [
    "AddRMSNorm",
    "Attention",
    "ColumnLinear",
    "Embedding",
    "ExpertStorage",
    "Experts",
    "ForwardBatch",
    "GatedActivation",
    "GatedMLP",
    "HeadsRMSNorm",
    "LMHead",
    "Layer",
    "Linear",
    "Placement",
    "QKVLinear",
    "RMSNorm",
    "Rope",
    "RopeParameters",
    "Router",
    "Routing",
    "RowLinear",
    "SharedGate",
    "Source",
    "SparseMLP",
    "bind",
]
