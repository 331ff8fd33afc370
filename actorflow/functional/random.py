"""Random numbers, each a pure function of the seed, the step, the op and the element.

So they are the same after a resume and under recomputation, and there is nothing of them to save.
A loop has a seed of its own, drawn where it stands, and counts its iterations as steps.
The counters and the seed that they follow from are variables of the trace: `step_of`, `batches_of`,
`seed_of`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from actorflow.functional.convolution import batched, unbatched
from actorflow.functional.elementwise import cos, log, sqrt, where
from actorflow.functional.order import argsort, topk
from actorflow.functional.reduce import argmax
from actorflow.tensor.literals import checked_number, checked_size, dtype_named, of_ranks
from actorflow.tensor.tensor import Operand, Tensor, apply, as_tensor, integers
from actorflow.tensor.tracer import Trace, current_trace, find_source, require_trace
from compiler.contract.attrs import AttrValue
from compiler.contract.errors import CompileError
from compiler.contract.types import DType, TensorType
from compiler.ops.language.expressions import Expression
from compiler.ops.primitives import sources
from compiler.ops.primitives.sources import SCRATCH

__all__ = [
    "alpha_dropout",
    "bernoulli",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "multinomial",
    "normal",
    "rand",
    "rand_at",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "uniform",
]


def step_of(trace: Trace) -> Tensor:
    """Return the number of finished steps as an int64 scalar."""
    counter = TensorType(DType.INT64, ())
    return Tensor(trace, trace.variable("step", counter, "counter", (("kind", "zeros"),)))


def batches_of(trace: Trace) -> Tensor:
    """Return the number of finished batches as an int64 scalar, where a step has several."""
    counter = TensorType(DType.INT64, ())
    return Tensor(trace, trace.variable("batches", counter, SCRATCH, (("kind", "zeros"),)))


def seed_of(trace: Trace) -> Tensor:
    """Return the seed of the run as an int64 scalar."""
    counter = TensorType(DType.INT64, ())
    return Tensor(trace, trace.variable("seed", counter, "counter", (("kind", "seed"),)))


def random_state(trace: Trace) -> tuple[Tensor, Tensor]:
    """Return what draws go by, int64 scalars: the seed, and the step, batch or iteration."""
    own = trace.random_state()
    if own is not None:
        return own
    return seed_of(trace), batches_of(trace) if trace.batches_per_step > 1 else step_of(trace)


def loop_seed() -> Tensor:
    """Return a new seed of 48 bits for the loop that stands here, an int64 scalar."""
    stream = _Drawing((), "a loop")
    high, low = [stream.bits().to(DType.INT64) for _ in range(2)]
    return high * (1 << 24) + low


Shape = int | Sequence[int]

_SELU_END = -1.7580993408473766
"""What SELU goes to far below 0."""


def dropout(x: Tensor, p: float = 0.5) -> Tensor:
    """Zero elements with probability p and scale the rest by 1/(1-p); where p is 1, all are zero.

    Outside training it is the identity. The mask is a pure function of (seed, step, this op,
    element), so that it replays after a resume and under recomputation.
    """
    value: object = x
    if isinstance(value, Expression):  # it would be the identity, for nothing trains while it runs
        raise CompileError(
            f"{find_source()}: a program draws no random numbers; draw them in the job, and make"
            " them an operand"
        )
    if drops_all(p):
        return as_tensor(x) * 0.0
    draws, attrs = dropped_by(p)
    return apply(sources.DROPOUT, x, *draws, **attrs) if draws else x


def drops_all(p: float) -> bool:
    """Whether a dropout keeps nothing: where p is 1, in training. It draws no numbers then."""
    trace = current_trace()
    return checked_probability(p) == 1.0 and trace is not None and trace.is_training


def dropped_by(p: float) -> tuple[tuple[Tensor, ...], dict[str, AttrValue]]:
    """Return the seed and step and the attributes of one dropout; nothing outside training."""
    p = checked_probability(p)
    trace = current_trace()
    if trace is None or not trace.is_training or p == 0.0:
        return (), {}
    attrs: dict[str, AttrValue] = {"p": p, "key": trace.next_random_key()}
    return random_state(trace), attrs


def dropout_of_channels(rank: int, x: Tensor, p: float = 0.5) -> Tensor:
    """Zero whole channels of x [N, C, *spatial], or [C, *spatial]; see `dropout`."""
    images = batched(x, rank, f"dropout{rank}d")
    ones = as_tensor(np.ones((*images.shape[:2], *[1] * rank), images.dtype.value))
    mask = dropout(ones, p)
    return as_tensor(x) if mask is ones else unbatched(images * mask, x, rank)


dropout1d, dropout2d, dropout3d = of_ranks(dropout_of_channels, "dropout")


def alpha_dropout(x: Tensor, p: float = 0.5) -> Tensor:
    """Put elements at what SELU gives far below 0, with probability p (Klambauer et al., 2017).

    The rest is scaled and shifted so that mean 0 and variance 1 stay. See `dropout`.
    """
    x, share = as_tensor(x), checked_probability(p)
    ones = as_tensor(np.ones(x.shape, x.dtype.value))
    mask = dropout(ones, share)
    if mask is ones:
        return x
    if share == 1.0:
        return x * mask
    # The variance after the drop is (1 - p)(1 + p s^2), its mean p s, for inputs of mean 0 and
    # variance 1.
    scale = 1.0 / math.sqrt((_SELU_END**2 * share + 1.0) * (1.0 - share))
    return where(mask > 0.0, x, _SELU_END) * scale - _SELU_END * share * scale


def checked_probability(p: float) -> float:
    """Return a dropout probability as a float. Raises CompileError outside of [0, 1]."""
    number = checked_number(p, "dropout probability")
    if not 0.0 <= number <= 1.0:
        raise CompileError(f"{find_source()}: dropout probability must be in [0, 1], got {number}")
    return number


class _Drawing:
    """Where the numbers of one call come from."""

    def __init__(self, shape: tuple[int, ...], what: str) -> None:
        trace = require_trace(
            what, "A parameter begins by an initialiser: nn.Parameter((3, 4), nn.init.normal_)"
        )
        self.trace, self.shape = trace, shape
        self.state = random_state(trace)

    def bits(self) -> Tensor:
        """Return 24 new bits for each element, int32."""
        key = self.trace.next_random_key()
        return apply(sources.RANDOM_BITS, *self.state, shape=self.shape, key=key)

    def uniform(self, dtype: DType, *, is_above_zero: bool = False) -> Tensor:
        """Return numbers in [0, 1) of as many bits as float32 has, of 48 in float64.

        `is_above_zero`: in (0, 1] and of 48 bits, so that a logarithm reaches far.
        """
        high = self.bits().to(dtype)
        if dtype is not DType.FLOAT64 and not is_above_zero:
            # 24 bits fill the mantissa of float32, so the product is exact and below 1.
            return high * 2.0**-24
        # 1 more in the last place: (0, 1] in place of [0, 1).
        low = self.bits().to(dtype) + (1.0 if is_above_zero else 0.0)
        return (high + low * 2.0**-24) * 2.0**-24


def _float(dtype: Any) -> DType:
    kind = DType.FLOAT32 if dtype is None else dtype_named(dtype, "dtype")
    if kind not in (DType.FLOAT32, DType.FLOAT64):
        raise CompileError(
            f"{find_source()}: random numbers are made in float32 or float64, got {kind}; convert"
            " them with .to(...)"
        )
    return kind


def uniform(low: float, high: float, size: Shape, *, dtype: Any = None) -> Tensor:
    """Return numbers that are equally likely anywhere in [low, high); float32 unless said.

    Of 24 bits in float32, 48 in float64. A pure function of the seed, the step, this call and the
    element: after a resume, recomputed, and on every device the same. Numbers of float32 in [0, 1)
    are those of numpy's Generator(Philox(key=[seed, draw], counter=[0, 0, step, 0])); draws are
    counted from 1 as the job is traced. float64 takes two, of which the first has the upper bits.
    """
    first = checked_number(low, "the low of uniform")
    width = checked_number(high, "the high of uniform") - first
    numbers = _Drawing(integers(size, what="an extent"), "uniform").uniform(_float(dtype))
    numbers = numbers if width == 1.0 else numbers * width
    return numbers if first == 0.0 else numbers + first


def rand(*size: Shape, dtype: Any = None) -> Tensor:
    """Return `uniform` numbers in [0, 1)."""
    return uniform(0.0, 1.0, integers(*size, what="an extent"), dtype=dtype)


def rand_at(seed: Tensor, place: Tensor) -> Tensor:
    """Return numbers in [0, 1), float64 of 48 bits, each a function of its seed and place alone.

    Both are int64 of one shape, and count modulo 2^31 and 2^29. The numbers are the same in every
    job and step, whatever else is drawn: for streams of samples that do not depend on one another.
    They are those of a Philox stream of key 0, at 8 * (place + 2^29 * seed).
    """
    seeds, places = as_tensor(seed, DType.INT64), as_tensor(place, DType.INT64)
    if seeds.type != places.type or seeds.dtype is not DType.INT64:
        raise CompileError(
            f"{find_source()}: rand_at needs seeds and places of int64 and of one shape, got"
            f" {seeds.type} and {places.type}"
        )
    first = (seeds % (1 << 31) * (1 << 29) + places % (1 << 29)) * 8
    none = as_tensor(0, DType.INT64)
    # Draws of a job are counted from 1, so no other op has this key.
    bits = apply(sources.RANDOM_BITS, none, none, first, shape=(*first.shape, 2), key=0)
    high, low = [bits[..., half].to(DType.FLOAT64) for half in (0, 1)]
    return (high + low * 2.0**-24) * 2.0**-24


def rand_like(x: Tensor, *, dtype: Any = None) -> Tensor:
    """Return `uniform` numbers in [0, 1) in the shape of x."""
    return uniform(0.0, 1.0, x.shape, dtype=x.dtype if dtype is None else dtype)


def normal(mean: Operand, std: Operand, size: Shape, *, dtype: Any = None) -> Tensor:
    """Return normally distributed numbers (Box & Muller, 1958); float32 unless said.

    The radius is made of 48 bits, so that numbers reach 8.1 standard deviations as often as they
    should. See `uniform` for what they are a function of; the last bit may differ between devices.
    """
    kind = _float(dtype)
    stream = _Drawing(integers(size, what="an extent"), "normal")
    # sqrt(-2 log 2^-48) = 8.16: the farthest that 48 bits reach.
    radius = sqrt(log(stream.uniform(kind, is_above_zero=True)) * -2.0)
    numbers = radius * cos(stream.uniform(kind) * (2.0 * math.pi))
    numbers = numbers if isinstance(std, (int, float)) and std == 1 else numbers * std
    return numbers if isinstance(mean, (int, float)) and mean == 0 else numbers + mean


def randn(*size: Shape, dtype: Any = None) -> Tensor:
    """Return `normal` numbers of mean 0 and standard deviation 1."""
    return normal(0.0, 1.0, integers(*size, what="an extent"), dtype=dtype)


def randn_like(x: Tensor, *, dtype: Any = None) -> Tensor:
    """Return `randn` in the shape of x."""
    return normal(0.0, 1.0, x.shape, dtype=x.dtype if dtype is None else dtype)


def bernoulli(p: Tensor) -> Tensor:
    """Return 1 with the probability that each element says, else 0, in the dtype of p."""
    p = as_tensor(p)
    kind = p.dtype if p.dtype in (DType.FLOAT32, DType.FLOAT64) else DType.FLOAT32
    numbers = _Drawing(p.shape, "bernoulli").uniform(kind)
    return (numbers < p.to(kind).detach()).to(p.dtype)


def randint(low: int, high: int, size: Shape, *, dtype: Any = None) -> Tensor:
    """Return integers that are equally likely in low..high - 1, int64 unless said.

    Of n numbers one is more likely than another by n / 2^48 at most.
    """
    first, last = checked_size(low, "the low of randint"), checked_size(high, "the high of randint")
    if not 0 < last - first <= 1 << 32:
        raise CompileError(
            f"{find_source()}: randint needs up to 2^32 integers from low to high - 1, got low"
            f" {first} and high {last}"
        )
    stream = _Drawing(integers(size, what="an extent"), "randint")
    numbers = (stream.uniform(DType.FLOAT64) * float(last - first)).to("int64") + first
    kind = DType.INT64 if dtype is None else dtype_named(dtype, "dtype")
    return numbers if kind is DType.INT64 else numbers.to(kind)


def randperm(n: int) -> Tensor:
    """Return the integers 0..n - 1 in an order by chance, int64: that of random numbers."""
    return argsort(randint(0, 1 << 32, n))


def multinomial(x: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    """Return places along the last axis of x, drawn as often as its elements weigh.

    int64 [..., num_samples]. Weights are 0 or more, and need no sum. Draws are the largest of
    weights divided by exponentially distributed numbers (Efraimidis & Spirakis, 2006). Without
    `replacement` a row needs as many weights above 0 as there are samples.
    """
    x, count = as_tensor(x), checked_size(num_samples, "num_samples")
    most = x.shape[-1] if x.ndim and not replacement else 1 << 48
    if not (x.ndim and x.dtype.is_float and 0 < count <= most):
        raise CompileError(
            f"{find_source()}: multinomial needs floats with an axis, and 1 sample or more, up to"
            f" its extent unless replacement=True; got {x.type} and {count} samples"
        )
    kind = DType.FLOAT64 if x.dtype is DType.FLOAT64 else DType.FLOAT32
    times = (count,) if replacement else (1,)
    shape = (*x.shape[:-1], *times, x.shape[-1])
    exponentials = log(_Drawing(shape, "multinomial").uniform(kind, is_above_zero=True)) * -1.0
    weights = x.detach().to(kind).reshape(*x.shape[:-1], 1, x.shape[-1])
    share = where(weights > 0.0, weights / exponentials, -1.0)
    if replacement:
        return argmax(share, -1)
    return topk(share.reshape(x.shape), count).indices
