"""Layers and models. `Module` and `Parameter` are the base; names and shapes follow torch's.

- `parameter`: a tensor that the optimizer changes, and its initialisers' specs.
- `batch_norm`: BatchNorm1d, BatchNorm2d, BatchNorm3d.
- `buffer`: state that is no parameter.
- `module`: a tree of parameters and buffers, named by path.
- `layers`: Linear, Embedding, LayerNorm, Dropout.
- `convolution`: Conv1d to 3d, their transposes, pools.
- `activations`: ReLU, GELU and the other functions without a weight, and PReLU.
- `transformer`: Attention, MLP, TransformerBlock.
"""

from actorflow.nn.activations import (
    CELU,
    ELU,
    GELU,
    GLU,
    SELU,
    Hardshrink,
    Hardsigmoid,
    Hardswish,
    Hardtanh,
    LeakyReLU,
    LogSigmoid,
    LogSoftmax,
    Mish,
    PReLU,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    Softmax,
    Softmin,
    Softplus,
    Softshrink,
    Softsign,
    Tanh,
    Tanhshrink,
    Threshold,
)
from actorflow.nn.batch_norm import BatchNorm1d, BatchNorm2d, BatchNorm3d
from actorflow.nn.buffer import Buffer
from actorflow.nn.convolution import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AdaptiveMaxPool1d,
    AdaptiveMaxPool2d,
    AdaptiveMaxPool3d,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
)
from actorflow.nn.layers import Dropout, Embedding, LayerNorm, Linear
from actorflow.nn.module import Module
from actorflow.nn.parameter import Parameter
from actorflow.nn.transformer import MLP, Attention, TransformerBlock

__all__ = [
    "CELU",
    "ELU",
    "GELU",
    "GLU",
    "MLP",
    "SELU",
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "Attention",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Buffer",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Dropout",
    "Embedding",
    "Hardshrink",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LogSigmoid",
    "LogSoftmax",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "Mish",
    "Module",
    "PReLU",
    "Parameter",
    "ReLU",
    "ReLU6",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softmin",
    "Softplus",
    "Softshrink",
    "Softsign",
    "Tanh",
    "Tanhshrink",
    "Threshold",
    "TransformerBlock",
]
