"""Layers and models. `Module` and `Parameter` are the base; names and shapes follow torch's.

- `init`: how parameters begin.
- `parameter`: a tensor that the optimizer changes, and its initialisers' specs.
- `batch_norm`: BatchNorm1d, BatchNorm2d, BatchNorm3d; `instance_norm`: the same of samples.
- `buffer`: state that is no parameter.
- `module`: a tree of parameters and buffers, named by path.
- `layers`: Linear, Bilinear, Embedding, EmbeddingBag, dropouts.
- `normalisation`: LayerNorm, RMSNorm, GroupNorm and others.
- `resize`: Upsample, PixelShuffle, Unfold and others.
- `containers`: Sequential, ModuleList, ModuleDict; `losses`: functions with their options held.
- `convolution`: Conv1d to 3d, their transposes; `pooling`: pools.
- `activations`: ReLU, GELU and the other functions without a weight, and PReLU.
- `function_layer`: a function as a layer, which activations, losses and pools are.
- `recurrent`: RNN, LSTM, GRU and their cells.
- `attention`: MultiheadAttention.
- `transformer`: Attention, MLP, SwiGLU, TransformerBlock, and torch's encoder and decoder.
- `shares`: how ranks share heads and hidden columns of a block.
"""

from actorflow.nn import init as init
from actorflow.nn.activations import CELU as CELU
from actorflow.nn.activations import ELU as ELU
from actorflow.nn.activations import GELU as GELU
from actorflow.nn.activations import GLU as GLU
from actorflow.nn.activations import SELU as SELU
from actorflow.nn.activations import Hardshrink as Hardshrink
from actorflow.nn.activations import Hardsigmoid as Hardsigmoid
from actorflow.nn.activations import Hardswish as Hardswish
from actorflow.nn.activations import Hardtanh as Hardtanh
from actorflow.nn.activations import LeakyReLU as LeakyReLU
from actorflow.nn.activations import LogSigmoid as LogSigmoid
from actorflow.nn.activations import LogSoftmax as LogSoftmax
from actorflow.nn.activations import Mish as Mish
from actorflow.nn.activations import PReLU as PReLU
from actorflow.nn.activations import ReLU as ReLU
from actorflow.nn.activations import ReLU6 as ReLU6
from actorflow.nn.activations import Sigmoid as Sigmoid
from actorflow.nn.activations import SiLU as SiLU
from actorflow.nn.activations import Softmax as Softmax
from actorflow.nn.activations import Softmin as Softmin
from actorflow.nn.activations import Softplus as Softplus
from actorflow.nn.activations import Softshrink as Softshrink
from actorflow.nn.activations import Softsign as Softsign
from actorflow.nn.activations import Tanh as Tanh
from actorflow.nn.activations import Tanhshrink as Tanhshrink
from actorflow.nn.activations import Threshold as Threshold
from actorflow.nn.attention import MultiheadAttention as MultiheadAttention
from actorflow.nn.batch_norm import BatchNorm1d as BatchNorm1d
from actorflow.nn.batch_norm import BatchNorm2d as BatchNorm2d
from actorflow.nn.batch_norm import BatchNorm3d as BatchNorm3d
from actorflow.nn.buffer import Buffer as Buffer
from actorflow.nn.containers import Flatten as Flatten
from actorflow.nn.containers import Identity as Identity
from actorflow.nn.containers import ModuleDict as ModuleDict
from actorflow.nn.containers import ModuleList as ModuleList
from actorflow.nn.containers import Sequential as Sequential
from actorflow.nn.containers import Unflatten as Unflatten
from actorflow.nn.convolution import Conv1d as Conv1d
from actorflow.nn.convolution import Conv2d as Conv2d
from actorflow.nn.convolution import Conv3d as Conv3d
from actorflow.nn.convolution import ConvTranspose1d as ConvTranspose1d
from actorflow.nn.convolution import ConvTranspose2d as ConvTranspose2d
from actorflow.nn.convolution import ConvTranspose3d as ConvTranspose3d
from actorflow.nn.instance_norm import InstanceNorm1d as InstanceNorm1d
from actorflow.nn.instance_norm import InstanceNorm2d as InstanceNorm2d
from actorflow.nn.instance_norm import InstanceNorm3d as InstanceNorm3d
from actorflow.nn.layers import AlphaDropout as AlphaDropout
from actorflow.nn.layers import Bilinear as Bilinear
from actorflow.nn.layers import Dropout as Dropout
from actorflow.nn.layers import Dropout1d as Dropout1d
from actorflow.nn.layers import Dropout2d as Dropout2d
from actorflow.nn.layers import Dropout3d as Dropout3d
from actorflow.nn.layers import Embedding as Embedding
from actorflow.nn.layers import EmbeddingBag as EmbeddingBag
from actorflow.nn.layers import Linear as Linear
from actorflow.nn.losses import BCELoss as BCELoss
from actorflow.nn.losses import BCEWithLogitsLoss as BCEWithLogitsLoss
from actorflow.nn.losses import CosineEmbeddingLoss as CosineEmbeddingLoss
from actorflow.nn.losses import CrossEntropyLoss as CrossEntropyLoss
from actorflow.nn.losses import CTCLoss as CTCLoss
from actorflow.nn.losses import GaussianNLLLoss as GaussianNLLLoss
from actorflow.nn.losses import HingeEmbeddingLoss as HingeEmbeddingLoss
from actorflow.nn.losses import HuberLoss as HuberLoss
from actorflow.nn.losses import KLDivLoss as KLDivLoss
from actorflow.nn.losses import L1Loss as L1Loss
from actorflow.nn.losses import MarginRankingLoss as MarginRankingLoss
from actorflow.nn.losses import MSELoss as MSELoss
from actorflow.nn.losses import NLLLoss as NLLLoss
from actorflow.nn.losses import PoissonNLLLoss as PoissonNLLLoss
from actorflow.nn.losses import SmoothL1Loss as SmoothL1Loss
from actorflow.nn.losses import SoftMarginLoss as SoftMarginLoss
from actorflow.nn.losses import TripletMarginLoss as TripletMarginLoss
from actorflow.nn.module import Module as Module
from actorflow.nn.normalisation import GroupNorm as GroupNorm
from actorflow.nn.normalisation import LayerNorm as LayerNorm
from actorflow.nn.normalisation import RMSNorm as RMSNorm
from actorflow.nn.parameter import Parameter as Parameter
from actorflow.nn.pooling import AdaptiveAvgPool1d as AdaptiveAvgPool1d
from actorflow.nn.pooling import AdaptiveAvgPool2d as AdaptiveAvgPool2d
from actorflow.nn.pooling import AdaptiveAvgPool3d as AdaptiveAvgPool3d
from actorflow.nn.pooling import AdaptiveMaxPool1d as AdaptiveMaxPool1d
from actorflow.nn.pooling import AdaptiveMaxPool2d as AdaptiveMaxPool2d
from actorflow.nn.pooling import AdaptiveMaxPool3d as AdaptiveMaxPool3d
from actorflow.nn.pooling import AvgPool1d as AvgPool1d
from actorflow.nn.pooling import AvgPool2d as AvgPool2d
from actorflow.nn.pooling import AvgPool3d as AvgPool3d
from actorflow.nn.pooling import MaxPool1d as MaxPool1d
from actorflow.nn.pooling import MaxPool2d as MaxPool2d
from actorflow.nn.pooling import MaxPool3d as MaxPool3d
from actorflow.nn.recurrent import GRU as GRU
from actorflow.nn.recurrent import LSTM as LSTM
from actorflow.nn.recurrent import RNN as RNN
from actorflow.nn.recurrent import GRUCell as GRUCell
from actorflow.nn.recurrent import LSTMCell as LSTMCell
from actorflow.nn.recurrent import RNNCell as RNNCell
from actorflow.nn.resize import ChannelShuffle as ChannelShuffle
from actorflow.nn.resize import Fold as Fold
from actorflow.nn.resize import PixelShuffle as PixelShuffle
from actorflow.nn.resize import PixelUnshuffle as PixelUnshuffle
from actorflow.nn.resize import Unfold as Unfold
from actorflow.nn.resize import Upsample as Upsample
from actorflow.nn.transformer import MLP as MLP
from actorflow.nn.transformer import Attention as Attention
from actorflow.nn.transformer import SwiGLU as SwiGLU
from actorflow.nn.transformer import TransformerBlock as TransformerBlock
from actorflow.nn.transformer import TransformerDecoder as TransformerDecoder
from actorflow.nn.transformer import TransformerDecoderLayer as TransformerDecoderLayer
from actorflow.nn.transformer import TransformerEncoder as TransformerEncoder
from actorflow.nn.transformer import TransformerEncoderLayer as TransformerEncoderLayer
