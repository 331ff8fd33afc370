"""What a launch asks of a CUDA device: a closed set of calls, as data.

A kernel's `bind` returns the calls of its launch, in order; the device puts them on a stream, and
records them into a graph. A call allocates nothing and waits for nothing.

**Kernel texts.** A text is C that NVRTC takes as CUDA C++ and a C compiler takes behind a header
that emulates threads; `device.cuh` defines the words of both. Its kernels are declared

    typedef struct { af_word w[16]; } NAME_arguments;
    AF_KERNEL NAME(AF_ARGUMENTS(NAME) arguments) { const af_word *a = arguments.w; ... }

with one argument, a struct of 64-bit words that is passed by value, so that a text serves every
shape. No text uses atomics on floats: what a kernel computes does not depend on the order in which
its blocks run.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from compiler.contract.types import DType

# The record of a call of cuDNN, or of cuBLASLt (`LtProduct`), says what is wanted. The executor
# makes the library's graph or descriptors of it; what those say can be read back and compared with
# this.

FORWARD = ("q", "k", "v", "y", "lse")
BACKWARD = ("q", "k", "v", "y", "dy", "lse", "dq", "dk", "dv")
CONV = ("x", "weight", "y")
CONV_INPUT_GRAD = ("dy", "weight", "dx")
CONV_WEIGHT_GRAD = ("x", "dy", "dweight")
RESULTS = {FORWARD: 2, BACKWARD: 3, CONV: 1, CONV_INPUT_GRAD: 1, CONV_WEIGHT_GRAD: 1}
"""How many of the tensors, from the end, are written."""

Extents = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CudnnTensor:
    """A tensor; strides are in elements. The name says what it is in a call."""

    name: str
    dtype: DType
    shape: Extents
    strides: Extents

    @property
    def span_bytes(self) -> int:
        """Bytes from the first element to behind the last."""
        pairs = zip(self.shape, self.strides, strict=True)
        return (sum([(n - 1) * s for n, s in pairs]) + 1) * self.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class CudnnRecord:
    """What calls have in common: their tensors, first those that are read."""

    __slots__ = ()

    tensors: tuple[CudnnTensor, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors, which say what is computed."""
        return tuple([tensor.name for tensor in self.tensors])

    @property
    def num_results(self) -> int:
        """How many tensors are written: the last ones."""
        return RESULTS[self.names]


@dataclass(frozen=True, slots=True)
class SdpaCall(CudnnRecord):
    """Attention, whose tensors are named as `FORWARD` has them, or its gradient (`BACKWARD`).

    Tensors are [batch, heads, rows, width], with a last stride of 1.
    y = softmax(scale q kT) v; lse [batch, heads, rows, 1], in float32, is the natural logarithm of
    the sum of exponentials of a row of scores. Causal: a query sees as many keys fewer than all as
    there are queries after it, so that the last of them sees every key.

    `keeps_scores`: a gradient has room for that of all scores in its workspace; else it has room
    for dq in float32, to which blocks add in order. Both give the same bits in every run.
    """

    tensors: tuple[CudnnTensor, ...]
    scale: float
    causal: bool
    keeps_scores: bool = False

    @property
    def is_backward(self) -> bool:
        """Whether it is the gradient."""
        return self.names == BACKWARD

    @property
    def about(self) -> str:
        """What is said of it to a person."""
        q, k, v = self.tensors[:3]
        what = "the gradient of attention" if self.is_backward else "attention"
        mask = ", causal" if self.causal else ""
        return f"{what} of {q.dtype.value} {list(q.shape)} by {k.shape[2]} keys, {v.shape[3]}{mask}"


@dataclass(frozen=True, slots=True)
class ConvCall(CudnnRecord):
    """A convolution (`CONV`), or its gradient by x or the weight, added up in float32.

    Tensors are [N, C, *spatial], [O, C / groups, *kernel] and [N, O, *positions]; it is the
    cross-correlation with `padding` zeros before and behind each spatial axis.
    """

    tensors: tuple[CudnnTensor, ...]
    padding: Extents
    strides: Extents
    dilation: Extents

    @property
    def roles(self) -> tuple[CudnnTensor, CudnnTensor, CudnnTensor]:
        """The image, the weight and the result of the convolution, or what has their places."""
        first, second, third = self.tensors
        if self.names == CONV_INPUT_GRAD:
            return third, second, first
        return (first, third, second) if self.names == CONV_WEIGHT_GRAD else (first, second, third)

    @property
    def groups(self) -> int:
        """How many groups of channels there are."""
        image, weight, _ = self.roles
        return image.shape[1] // weight.shape[1]

    @property
    def about(self) -> str:
        """What is said of it to a person."""
        image, weight, _ = self.roles
        what = "a convolution" if self.names == CONV else f"{self.names[-1]} of a convolution"
        return (
            f"{what} of {image.dtype.value} {list(image.shape)} by {list(weight.shape)}, strides"
            f" {list(self.strides)}"
        )


CudnnCall = SdpaCall | ConvCall


MOST_ALIGNMENT = 256
"""The library tells addresses apart up to here."""

AUX_BYTES, AUX_ELEMENTS = 16, 8
"""What the address and the stride of aux are multiples of."""


class LtEpilogue(Enum):
    """What the library does to a result before it stores it; the numbers are its own."""

    NONE = 1
    BIAS = 4
    GELU = 32
    GELU_BIAS = 36
    GELU_AUX = 160
    GELU_AUX_BIAS = 164
    DGELU = 192
    DGELU_BGRAD = 208
    BGRAD_A = 256
    BGRAD_B = 512


@dataclass(frozen=True, slots=True)
class LtLayout:
    """A column-major matrix [rows, columns]; strides are in elements, of a column and the batch.

    `alignment` divides its address, in bytes; 256 or less.
    """

    dtype: DType
    rows: int
    columns: int
    column_stride: int
    batch_stride: int = 0
    alignment: int = 16

    @property
    def text(self) -> str:
        """All of it, as part of a key."""
        steps = f"{self.column_stride}:{self.batch_stride}"
        return f"{self.dtype.value} {self.rows}x{self.columns} by {steps} at {self.alignment}"

    def span_bytes(self, batch: int) -> int:
        """Return the bytes from the first element of a batch to behind the last."""
        last = (batch - 1) * self.batch_stride + (self.columns - 1) * self.column_stride
        return (last + self.rows) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LtProduct:
    """d = epilogue(op(a) op(b) + beta c) for each of `batch` places; c lies as d does.

    op transposes where asked. `compute` is the type of the sums, and of beta. `bias` and `aux` are
    byte addresses of what the epilogue reads or writes; 0 for none. `bias_dtype` is d's if None.
    `aux` is a matrix as d is, with columns `aux_stride` elements apart, a multiple of
    `AUX_ELEMENTS`, at a multiple of `AUX_BYTES`.
    """

    a: LtLayout
    b: LtLayout
    d: LtLayout
    transpose_a: bool
    transpose_b: bool
    batch: int = 1
    beta: float = 0.0
    compute: DType = DType.FLOAT32
    epilogue: LtEpilogue = LtEpilogue.NONE
    bias: int = 0
    bias_dtype: DType | None = None
    aux: int = 0
    aux_stride: int = 0
    is_deterministic: bool = False

    @property
    def inner(self) -> int:
        """The extent that is summed over."""
        return self.a.rows if self.transpose_a else self.a.columns

    @property
    def bias_type(self) -> DType:
        """The element type of the bias, or of its gradient."""
        return self.bias_dtype or self.d.dtype

    @property
    def key(self) -> str:
        """What a choice of algorithm depends on: all but addresses, of which the alignment."""
        turned = f"{'T' if self.transpose_a else 'N'}{'T' if self.transpose_b else 'N'}"
        sums = f"{self.compute.value} beta {self.beta:g}"
        bias = f"{self.bias_type.value} {alignment_of(self.bias)}"
        finish = f"{self.epilogue.name} {bias} {alignment_of(self.aux)}"
        return "; ".join(
            [
                f"{turned} {self.batch}",
                *[layout.text for layout in (self.a, self.b, self.d)],
                sums,
                f"{finish} {self.aux_stride}",
                "deterministic" if self.is_deterministic else "any order",
            ]
        )


def alignment_of(address: int) -> int:
    """Return the largest power of 2 that divides an address, up to what the library tells apart."""
    return math.gcd(address, MOST_ALIGNMENT)


Word = int | float
"""An entry of an argument block: an integer or an address, or a double by its bits."""


@dataclass(frozen=True, slots=True)
class KernelText:
    """The text of some kernels, and their names in it. `about` says to a person what they do.

    Where the text says NAME, its own name is put: it follows from the content. `has_exchanges`:
    threads of a block meet in it, at a barrier or in a shuffle.
    """

    text: str
    kernels: tuple[str, ...]
    about: str = ""
    has_exchanges: bool = True

    @staticmethod
    def of(
        prefix: str, text: str, kernels: tuple[str, ...], about: str, *, has_exchanges: bool = True
    ) -> KernelText:
        """Return a text whose names begin with its own, which replaces NAME in all of them."""
        # Named by content: equal texts are one module, and different ones never collide in a file.
        digest = hashlib.blake2b(text.encode(), digest_size=10).hexdigest()
        own_name = f"{prefix}_{digest}"
        names = tuple([name.replace("NAME", own_name) for name in kernels])
        return KernelText(text.replace("NAME", own_name), names, about, has_exchanges)


def file_text(name: str, defined: Mapping[str, object] | None = None) -> str:
    """Return a .cuh file of this folder, behind definitions (`with_definitions`)."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return with_definitions(text, defined or {})


def with_definitions(text: str, defined: Mapping[str, object]) -> str:
    """Return a text behind what it calls NAME_ and a key, each as a macro: {"FROM(x)": "(x)"}."""
    lines = [f"#define NAME_{key} {meaning}" for key, meaning in defined.items()]
    return "\n".join([*lines, text])


Explain = Callable[[int, int], Exception]
"""From the place and the value of a bad index to the error that the host would raise."""


@dataclass(frozen=True, slots=True)
class StatusWord:
    """Where in an argument block a kernel finds the cell in which it reports a bad index.

    The device puts the cell's address into `word` of the block. `af_report(cell, place, value)`
    keeps the lowest place of the earliest firing, where all bools of `guards` have their values:
    pairs of an address on the device, and 0 or 1.
    """

    word: int
    explain: Explain
    guards: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RunKernel:
    """One kernel on a grid of blocks. `words` are its argument block."""

    text: KernelText
    name: str
    num_blocks: int
    num_threads: int
    words: tuple[Word, ...]
    shared_bytes: int = 0
    status: StatusWord | None = None


@dataclass(frozen=True, slots=True)
class CopyBytes:
    """Bytes from one address to another, of the device or of pinned memory."""

    target: int
    source: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FillBytes:
    """Every byte of a range set to one value."""

    target: int
    value: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RunProduct:
    """A matrix product of the library, on operands at these addresses; `workspace` may be 0."""

    product: LtProduct
    a: int
    b: int
    c: int
    d: int
    workspace: int
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class RunCudnn:
    """A call of cuDNN; `addresses` are its tensors', in the order of the record."""

    record: CudnnCall
    addresses: tuple[int, ...]
    workspace: int
    workspace_bytes: int


NCCL_DTYPES = (
    DType.INT8,
    DType.UINT8,
    DType.INT32,
    DType.UINT32,
    DType.INT64,
    DType.UINT64,
    DType.FLOAT16,
    DType.FLOAT32,
    DType.FLOAT64,
    DType.BFLOAT16,
)
"""What NCCL moves and reduces."""


class CollectiveKind(Enum):
    """What NCCL does on the ranks of a communicator; `RunCollective` has the operands."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    EXCHANGE = "exchange"


@dataclass(frozen=True, slots=True)
class RunCollective:
    """A call of NCCL by this rank of a communicator, on contiguous memory.

    `counts` are elements, one for each rank of the communicator: the parts of what is scattered or
    gathered, which lie one after another, or what is sent to each; of an all-reduce all elements,
    alone. `received` are those that an exchange gets from each rank. `by` is "sum", "max" or "min".
    """

    kind: CollectiveKind
    communicator: int
    source: int
    target: int
    counts: tuple[int, ...]
    dtype: DType
    by: str = ""
    received: tuple[int, ...] = ()


DeviceCall = RunKernel | CopyBytes | FillBytes | RunProduct | RunCudnn | RunCollective
DeviceCalls = tuple[DeviceCall, ...]


@dataclass(frozen=True, slots=True)
class AlternativeCalls:
    """Several ways to do the same, of which the device takes one: the fastest, measured at load.

    The first is the one to take where nothing is measured. A way of which a library does not
    compute a call is left out; all write the same memory, and none of them reports bad indices.
    """

    alternatives: tuple[DeviceCalls, ...]


LaunchCalls = tuple[DeviceCall | AlternativeCalls, ...]
"""What `bind` returns: the calls of a launch, in order."""


def every_call(calls: LaunchCalls) -> Iterator[DeviceCall]:
    """Yield the calls, those of all ways among them."""
    for call in calls:
        if isinstance(call, AlternativeCalls):
            yield from itertools.chain(*call.alternatives)
        else:
            yield call
