"""Layers and models. `Module` and `Parameter` are the base; names and shapes follow torch's.

- `parameter`: a tensor that the optimizer changes, and its initialisers' specs.
- `module`: a tree of parameters, named by path.
- `layers`: Linear, Embedding, LayerNorm, Dropout.
- `transformer`: Attention, MLP, TransformerBlock.
"""

from actorflow.nn.layers import Dropout, Embedding, LayerNorm, Linear
from actorflow.nn.module import Module
from actorflow.nn.parameter import Parameter
from actorflow.nn.transformer import MLP, Attention, TransformerBlock

__all__ = [
    "MLP",
    "Attention",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "Module",
    "Parameter",
    "TransformerBlock",
]
