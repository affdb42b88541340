"""The parts that model files are made of."""

from samovar.layers.attention import Attention
from samovar.layers.batch import ForwardBatch
from samovar.layers.elementwise import Activation, Clip, Columns, ExpandedIntegral, PositionScale, Scalar
from samovar.layers.embedding import Embedding, LMHead
from samovar.layers.layer import Layer, Placement, Source, bind
from samovar.layers.layer_norm import AddLayerNorm, HeadsLayerNorm, LayerNorm
from samovar.layers.linear import ColumnLinear, HeadsLinear, Linear, QKVLinear, RowLinear, halves_first
from samovar.layers.mlp import MLP, GatedActivation, GatedMLP
from samovar.layers.moe import Experts, ExpertStorage, Router, Routing, SharedGate, SparseMLP
from samovar.layers.norm import AddRMSNorm, HeadsRMSNorm, RMSNorm, UnitRMSNorm
from samovar.layers.rope import Rope, RopeParameters
from samovar.layers.shared_attention import QueryRope, SharedAttention

__all__ = [
    "MLP",
    "Activation",
    "AddLayerNorm",
    "AddRMSNorm",
    "Attention",
    "Clip",
    "ColumnLinear",
    "Columns",
    "Embedding",
    "ExpandedIntegral",
    "ExpertStorage",
    "Experts",
    "ForwardBatch",
    "GatedActivation",
    "GatedMLP",
    "HeadsLayerNorm",
    "HeadsLinear",
    "HeadsRMSNorm",
    "LMHead",
    "Layer",
    "LayerNorm",
    "Linear",
    "Placement",
    "PositionScale",
    "QKVLinear",
    "QueryRope",
    "RMSNorm",
    "Rope",
    "RopeParameters",
    "Router",
    "Routing",
    "RowLinear",
    "Scalar",
    "SharedAttention",
    "SharedGate",
    "Source",
    "SparseMLP",
    "UnitRMSNorm",
    "bind",
    "halves_first",
]
