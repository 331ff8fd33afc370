"""Layers and models. `Module` and `Parameter` are the base; names and shapes follow torch's.

A module is a tree of modules, parameters and buffers, found in its attributes and named by path. A
parameter is a tensor of the traced graph; its values lie in a cell, which a training run leases.

module.py           `Module`: the tree, its paths, state and load
parameter.py        `Parameter`, which the optimizer changes, and `Buffer`, which the job may change
init.py             af.nn.init: how parameters begin
functional.py       actorflow.functional under torch's name
weights.py          weights from elsewhere, matched with the paths of a model
adapters.py         `lora`: low-rank adapters of linear layers
lease.py            who has the values: the parameter, or one training run at a time
function_layers.py  `FunctionLayer`: activations, losses, pools and resizing as layers
layers.py           Linear, Embedding, dropouts, Sequential and other containers, convolutions
padding.py          paddings by a constant, a reflection, the edge or the other end
parametrizations.py weights that are computed: `weight_norm`, `spectral_norm`
norm_layers.py      BatchNorm, InstanceNorm, LayerNorm, RMSNorm, GroupNorm
recurrent.py        RNN, LSTM, GRU and their cells
attention.py        MultiheadAttention, and how ranks share the heads of a block
transformer.py      Attention, MLP, SwiGLU, blocks, and torch's Transformer

May import actorflow.functional, actorflow.tensor, actorflow.environment, actorflow.checkpoint,
actors.machine (errors alone), compiler.contract, compiler.graph and compiler.ops.primitives. Must
not import a run: lease.py states what it asks of one. Begin reading at module.py.
"""

from actorflow.nn import functional as functional
from actorflow.nn import init as init
from actorflow.nn.adapters import LoRA as LoRA
from actorflow.nn.adapters import lora as lora
from actorflow.nn.attention import MultiheadAttention as MultiheadAttention
from actorflow.nn.function_layers import CELU as CELU
from actorflow.nn.function_layers import ELU as ELU
from actorflow.nn.function_layers import GELU as GELU
from actorflow.nn.function_layers import GLU as GLU
from actorflow.nn.function_layers import SELU as SELU
from actorflow.nn.function_layers import AdaptiveAvgPool1d as AdaptiveAvgPool1d
from actorflow.nn.function_layers import AdaptiveAvgPool2d as AdaptiveAvgPool2d
from actorflow.nn.function_layers import AdaptiveAvgPool3d as AdaptiveAvgPool3d
from actorflow.nn.function_layers import AdaptiveMaxPool1d as AdaptiveMaxPool1d
from actorflow.nn.function_layers import AdaptiveMaxPool2d as AdaptiveMaxPool2d
from actorflow.nn.function_layers import AdaptiveMaxPool3d as AdaptiveMaxPool3d
from actorflow.nn.function_layers import AvgPool1d as AvgPool1d
from actorflow.nn.function_layers import AvgPool2d as AvgPool2d
from actorflow.nn.function_layers import AvgPool3d as AvgPool3d
from actorflow.nn.function_layers import BCELoss as BCELoss
from actorflow.nn.function_layers import BCEWithLogitsLoss as BCEWithLogitsLoss
from actorflow.nn.function_layers import ChannelShuffle as ChannelShuffle
from actorflow.nn.function_layers import CosineEmbeddingLoss as CosineEmbeddingLoss
from actorflow.nn.function_layers import CosineSimilarity as CosineSimilarity
from actorflow.nn.function_layers import CrossEntropyLoss as CrossEntropyLoss
from actorflow.nn.function_layers import CTCLoss as CTCLoss
from actorflow.nn.function_layers import Fold as Fold
from actorflow.nn.function_layers import GaussianNLLLoss as GaussianNLLLoss
from actorflow.nn.function_layers import Hardshrink as Hardshrink
from actorflow.nn.function_layers import Hardsigmoid as Hardsigmoid
from actorflow.nn.function_layers import Hardswish as Hardswish
from actorflow.nn.function_layers import Hardtanh as Hardtanh
from actorflow.nn.function_layers import HingeEmbeddingLoss as HingeEmbeddingLoss
from actorflow.nn.function_layers import HuberLoss as HuberLoss
from actorflow.nn.function_layers import KLDivLoss as KLDivLoss
from actorflow.nn.function_layers import L1Loss as L1Loss
from actorflow.nn.function_layers import LeakyReLU as LeakyReLU
from actorflow.nn.function_layers import LogSigmoid as LogSigmoid
from actorflow.nn.function_layers import LogSoftmax as LogSoftmax
from actorflow.nn.function_layers import MarginRankingLoss as MarginRankingLoss
from actorflow.nn.function_layers import MaxPool1d as MaxPool1d
from actorflow.nn.function_layers import MaxPool2d as MaxPool2d
from actorflow.nn.function_layers import MaxPool3d as MaxPool3d
from actorflow.nn.function_layers import Mish as Mish
from actorflow.nn.function_layers import MSELoss as MSELoss
from actorflow.nn.function_layers import NLLLoss as NLLLoss
from actorflow.nn.function_layers import PairwiseDistance as PairwiseDistance
from actorflow.nn.function_layers import PixelShuffle as PixelShuffle
from actorflow.nn.function_layers import PixelUnshuffle as PixelUnshuffle
from actorflow.nn.function_layers import PoissonNLLLoss as PoissonNLLLoss
from actorflow.nn.function_layers import PReLU as PReLU
from actorflow.nn.function_layers import ReLU as ReLU
from actorflow.nn.function_layers import ReLU6 as ReLU6
from actorflow.nn.function_layers import Sigmoid as Sigmoid
from actorflow.nn.function_layers import SiLU as SiLU
from actorflow.nn.function_layers import SmoothL1Loss as SmoothL1Loss
from actorflow.nn.function_layers import SoftMarginLoss as SoftMarginLoss
from actorflow.nn.function_layers import Softmax as Softmax
from actorflow.nn.function_layers import Softmin as Softmin
from actorflow.nn.function_layers import Softplus as Softplus
from actorflow.nn.function_layers import Softshrink as Softshrink
from actorflow.nn.function_layers import Softsign as Softsign
from actorflow.nn.function_layers import Tanh as Tanh
from actorflow.nn.function_layers import Tanhshrink as Tanhshrink
from actorflow.nn.function_layers import Threshold as Threshold
from actorflow.nn.function_layers import TripletMarginLoss as TripletMarginLoss
from actorflow.nn.function_layers import Unfold as Unfold
from actorflow.nn.function_layers import Upsample as Upsample
from actorflow.nn.layers import AlphaDropout as AlphaDropout
from actorflow.nn.layers import Bilinear as Bilinear
from actorflow.nn.layers import Conv1d as Conv1d
from actorflow.nn.layers import Conv2d as Conv2d
from actorflow.nn.layers import Conv3d as Conv3d
from actorflow.nn.layers import ConvTranspose1d as ConvTranspose1d
from actorflow.nn.layers import ConvTranspose2d as ConvTranspose2d
from actorflow.nn.layers import ConvTranspose3d as ConvTranspose3d
from actorflow.nn.layers import Dropout as Dropout
from actorflow.nn.layers import Dropout1d as Dropout1d
from actorflow.nn.layers import Dropout2d as Dropout2d
from actorflow.nn.layers import Dropout3d as Dropout3d
from actorflow.nn.layers import Embedding as Embedding
from actorflow.nn.layers import EmbeddingBag as EmbeddingBag
from actorflow.nn.layers import Flatten as Flatten
from actorflow.nn.layers import Identity as Identity
from actorflow.nn.layers import Linear as Linear
from actorflow.nn.layers import ModuleDict as ModuleDict
from actorflow.nn.layers import ModuleList as ModuleList
from actorflow.nn.layers import ParameterDict as ParameterDict
from actorflow.nn.layers import ParameterList as ParameterList
from actorflow.nn.layers import Sequential as Sequential
from actorflow.nn.layers import Unflatten as Unflatten
from actorflow.nn.module import Module as Module
from actorflow.nn.norm_layers import BatchNorm1d as BatchNorm1d
from actorflow.nn.norm_layers import BatchNorm2d as BatchNorm2d
from actorflow.nn.norm_layers import BatchNorm3d as BatchNorm3d
from actorflow.nn.norm_layers import GroupNorm as GroupNorm
from actorflow.nn.norm_layers import InstanceNorm1d as InstanceNorm1d
from actorflow.nn.norm_layers import InstanceNorm2d as InstanceNorm2d
from actorflow.nn.norm_layers import InstanceNorm3d as InstanceNorm3d
from actorflow.nn.norm_layers import LayerNorm as LayerNorm
from actorflow.nn.norm_layers import RMSNorm as RMSNorm
from actorflow.nn.padding import CircularPad1d as CircularPad1d
from actorflow.nn.padding import CircularPad2d as CircularPad2d
from actorflow.nn.padding import CircularPad3d as CircularPad3d
from actorflow.nn.padding import ConstantPad1d as ConstantPad1d
from actorflow.nn.padding import ConstantPad2d as ConstantPad2d
from actorflow.nn.padding import ConstantPad3d as ConstantPad3d
from actorflow.nn.padding import ReflectionPad1d as ReflectionPad1d
from actorflow.nn.padding import ReflectionPad2d as ReflectionPad2d
from actorflow.nn.padding import ReflectionPad3d as ReflectionPad3d
from actorflow.nn.padding import ReplicationPad1d as ReplicationPad1d
from actorflow.nn.padding import ReplicationPad2d as ReplicationPad2d
from actorflow.nn.padding import ReplicationPad3d as ReplicationPad3d
from actorflow.nn.padding import ZeroPad1d as ZeroPad1d
from actorflow.nn.padding import ZeroPad2d as ZeroPad2d
from actorflow.nn.padding import ZeroPad3d as ZeroPad3d
from actorflow.nn.parameter import Buffer as Buffer
from actorflow.nn.parameter import Parameter as Parameter
from actorflow.nn.parametrizations import spectral_norm as spectral_norm
from actorflow.nn.parametrizations import weight_norm as weight_norm
from actorflow.nn.recurrent import GRU as GRU
from actorflow.nn.recurrent import LSTM as LSTM
from actorflow.nn.recurrent import RNN as RNN
from actorflow.nn.recurrent import GRUCell as GRUCell
from actorflow.nn.recurrent import LSTMCell as LSTMCell
from actorflow.nn.recurrent import RNNCell as RNNCell
from actorflow.nn.transformer import MLP as MLP
from actorflow.nn.transformer import Attention as Attention
from actorflow.nn.transformer import SwiGLU as SwiGLU
from actorflow.nn.transformer import Transformer as Transformer
from actorflow.nn.transformer import TransformerBlock as TransformerBlock
from actorflow.nn.transformer import TransformerDecoder as TransformerDecoder
from actorflow.nn.transformer import TransformerDecoderLayer as TransformerDecoderLayer
from actorflow.nn.transformer import TransformerEncoder as TransformerEncoder
from actorflow.nn.transformer import TransformerEncoderLayer as TransformerEncoderLayer
