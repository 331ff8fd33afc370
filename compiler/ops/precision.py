"""How wide each op computes when a job asks for 16-bit floats: the lists, in one place.

After torch's autocast on the CPU (Micikevicius et al., Mixed Precision Training, 2018, section 3):
products read low values, what only moves or bends single elements takes what comes, and all else
(sums, means, exponentials, softmax, norms, losses, updates) stays in float32. An op of another
file says so itself, where it is registered; one that says nothing stays in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from compiler.fusion.products import grad_op
from compiler.ops import (
    activation,
    attention,
    binary,
    convolution,
    elementwise,
    matmul,
    pooling,
    shape,
    slicing,
)
from compiler.ops.copies import COPY_TO
from compiler.ops.random import DROPOUT
from compiler.ops.to_sbp import TO_SBP
from compiler.registry import OpAttr


class Width(Enum):
    """What an op does with float32 inputs in a job that computes in bfloat16."""

    LOW = "low"
    """Reads low values; its outputs are what its types say."""
    FOLLOW = "follow"
    """Computes in the low type where its inputs are, and somebody reads the result so."""
    HIGH = "high"
    """Reads and makes float32."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The width of an op.

    `kept` are positions of inputs that a LOW op reads in float32 all the same. With
    `chooses_output` the op has an attribute out_dtype: "float32" where nobody reads a low value.
    `needs_range`: it makes numbers so much larger that float16, which ends at 65,504, will not do.
    """

    width: Width
    kept: tuple[int, ...] = ()
    chooses_output: bool = False
    needs_range: bool = False


precision = OpAttr[Precision](
    "precision",
    "how wide the op computes where a job asks for 16-bit floats; read by the precision pass",
    default=Precision(Width.HIGH),
)

precision.register(matmul.MATMUL, Precision(Width.LOW, chooses_output=True))
precision.register(attention.ATTENTION, Precision(Width.LOW))
precision.register(attention.ATTENTION_GRAD, Precision(Width.LOW, kept=(5,)))
for _op in (convolution.CONV, convolution.CONV_INPUT_GRAD, convolution.CONV_WEIGHT_GRAD):
    precision.register(_op, Precision(Width.LOW))

FOLLOWING = (
    *(shape.RESHAPE, shape.TRANSPOSE, shape.BROADCAST_TO, shape.STOP_GRADIENT, shape.COPY),
    *(slicing.SLICE, slicing.PAD, slicing.CONCAT),
    *(binary.ADD, binary.SUB, binary.MUL, binary.DIV, binary.MAXIMUM, binary.MINIMUM),
    binary.WHERE,
    *(elementwise.NEG, elementwise.ABS),
    *(activation.TANH, activation.SIGMOID, activation.RELU, activation.GELU, activation.SILU),
    *(activation.GELU_EXACT, activation.LEAKY_RELU, activation.HARDTANH, activation.HARDSWISH),
    *(grad_op(activation.GELU_EXACT), grad_op(activation.HARDTANH)),
    *(grad_op(activation.SIGMOID), grad_op(activation.RELU)),
    *(grad_op(activation.GELU), grad_op(activation.SILU)),
    *(pooling.MAX_POOL, pooling.MAX_POOL_GRAD, pooling.MAX_POOL_PICK),
    DROPOUT,
    COPY_TO,
    TO_SBP,
)
"""The ops that take what comes. Comparisons do not: low or not, the answer is the same."""

for _op in FOLLOWING:
    precision.register(_op, Precision(Width.FOLLOW))
precision.register(elementwise.SQUARE, Precision(Width.FOLLOW, needs_range=True))
