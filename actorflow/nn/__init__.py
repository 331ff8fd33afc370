"""Layers and models. `Module` and `Parameter` are the base; names and shapes follow torch's.

- `parameter`: a tensor that the optimizer changes, and its initialisers' specs.
- `buffer`: state that is no parameter.
- `module`: a tree of parameters and buffers, named by path.
- `layers`: Linear, Embedding, LayerNorm, Dropout.
- `transformer`: Attention, MLP, TransformerBlock.
"""

from actorflow.nn.buffer import Buffer
from actorflow.nn.layers import Dropout, Embedding, LayerNorm, Linear
from actorflow.nn.module import Module
from actorflow.nn.parameter import Parameter
from actorflow.nn.transformer import MLP, Attention, TransformerBlock

__all__ = [
    "MLP",
    "Attention",
    "Buffer",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "Module",
    "Parameter",
    "TransformerBlock",
]
