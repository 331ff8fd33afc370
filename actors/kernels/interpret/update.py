"""Updates of variables: optimizers and the step counter.

The outputs lie over the inputs (`writes` in the op table); each kernel is also right when they do
not. Walks over flat blocks; what changes per step (learning rate, bias corrections) is computed
in Python from the 0-d operands at each launch and written to 0-d scratch that the bound calls
read. A last operand `skip` that is not 0 leaves all as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.attributes import flag, number
from actors.kernels.interpret.bfloat16 import has_bfloat16
from actors.kernels.interpret.blocks import block_elements, cut
from actors.kernels.kernel import Attrs, KernelNeeds, Operands, Workspace, in_sequence
from actors.kernels.scratch import Piece
from actors.kernels.work import BytePass, Work, over_blocks, over_operands
from actors.protocol import Array, Arrays, Launch


@dataclass(frozen=True, slots=True)
class IncrementKernel:
    """`increment`(step, by) -> step + by; 1 where `by` is left out."""

    name: str = "numpy.increment"
    op: str = "increment"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take every call."""
        return cost.needs(inputs, outputs, Work(), in_place=((0, 0),))

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return one addition."""
        step, *by = inputs
        return partial(np.add, step, by[0] if by else np.array(1, step.dtype), out=outputs[0])


Block = Callable[[Attrs, Arrays, Array, Arrays, Arrays, Arrays], list[Launch]]
"""The calls for a block: attrs, the old values, the gradient, the new ones, two blocks of scratch,
and the scalars."""


@dataclass(frozen=True, slots=True)
class FlatUpdateKernel:
    """`op`(param, grad, *states, *rates, skip) -> (param', *states'), block by block.

    Scratch is two blocks, and the scalars that `begin` computes of the rates at every launch.
    """

    op: str
    num_states: int
    num_rates: int
    num_scalars: int
    passes: Callable[[Attrs], dict[BytePass, float]]
    begin: Callable[[Attrs, Arrays, Arrays], Launch]
    block: Block

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"numpy.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take floats."""
        param = inputs[0]
        if not param.type.dtype.is_float or has_bfloat16(inputs):
            return None
        elements, passes = param.type.num_elements, self.passes(attrs)
        small = self.num_scalars + 1 if self.num_scalars > 1 else 0
        work = over_blocks(elements, param.dtype.itemsize, passes, small_calls=small)
        size = scratch.size_bytes(self._pieces(elements, param.dtype))
        pairs = ((0, 0), *[(1 + i, 2 + i) for i in range(self.num_states)])
        return cost.needs(inputs, outputs, work, size, pairs)

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the launch: the scalars, then the blocks; or what keeps the old values."""
        states = 2 + self.num_states
        param, olds = inputs[0], (inputs[0], *inputs[2:states])
        rates, skip = inputs[states : states + self.num_rates], inputs[states + self.num_rates :]
        pieces = self._pieces(param.size, param.dtype)
        first, second, *scalars = scratch.carve(workspace, pieces)
        calls = [self.begin(attrs, rates, tuple(scalars))]
        arrays = (inputs[1], *olds, *outputs)
        for grad, *both in cut(arrays, param.ndim, block_elements(param.itemsize)):
            old, new = tuple(both[: len(olds)]), tuple(both[len(olds) :])
            free = (scratch.window(first, grad.shape), scratch.window(second, grad.shape))
            calls += self.block(attrs, old, grad, new, free, tuple(scalars))
        update = in_sequence(calls)
        if not skip:
            return update
        pairs = zip(outputs, olds, strict=True)
        apart = [pair for pair in pairs if not np.may_share_memory(*pair)]
        keep = in_sequence([partial(np.copyto, new, old) for new, old in apart])

        def launch() -> None:
            (keep if skip[0].item() else update)()

        return launch

    def _pieces(self, elements: int, dtype: np.dtype[np.generic]) -> tuple[Piece, ...]:
        block = Piece((min(elements, block_elements(dtype.itemsize)),), dtype)
        return (block, block, *[Piece((), dtype)] * self.num_scalars)


def _sgd_passes(attrs: Attrs) -> dict[BytePass, float]:
    terms = 1 + (number(attrs, "weight_decay") != 0.0)
    if "momentum" in attrs:
        terms += 1 + flag(attrs, "nesterov")
    return {BytePass.SIMPLE: terms, BytePass.PLAIN: terms}


def _sgd_rate(attrs: Attrs, rates: Arrays, scalars: Arrays) -> Launch:
    return partial(np.copyto, scalars[0], rates[0], casting="unsafe")


def _sgd(
    attrs: Attrs, olds: Arrays, g: Array, news: Arrays, free: Arrays, scalars: Arrays
) -> list[Launch]:
    """Return plain descent, or with a state that with momentum.

    torch's semantics: g += weight_decay * p; buffer = momentum * buffer + g; with nesterov the step
    is g + momentum * buffer, else buffer; p -= lr * step (Sutskever et al. 2013, section 2).
    """
    (p, *buffer), (t, u), (lr,) = olds, free, scalars
    decay = number(attrs, "weight_decay")
    calls: list[Launch] = []
    if decay != 0.0:
        calls.append(partial(np.multiply, p, np.array(decay, p.dtype), out=t))
        calls.append(partial(np.add, t, g, out=t))
        g = t
    if buffer:
        momentum, out = np.array(number(attrs, "momentum"), p.dtype), news[1]
        calls.append(partial(np.multiply, buffer[0], momentum, out=out))
        calls.append(partial(np.add, out, g, out=out))
        if flag(attrs, "nesterov"):
            calls.append(partial(np.multiply, out, momentum, out=u))
            calls.append(partial(np.add, u, g, out=u))
        g = u if flag(attrs, "nesterov") else out
    calls.append(partial(np.multiply, g, lr, out=u))
    calls.append(partial(np.subtract, p, u, out=news[0]))
    return calls


def _adamw_passes(attrs: Attrs) -> dict[BytePass, float]:
    simple = 7 + (number(attrs, "weight_decay") != 0.0)
    return {BytePass.SIMPLE: simple, BytePass.PLAIN: 3, BytePass.ROOT: 1, BytePass.DIVIDE: 1}


def _adamw(
    attrs: Attrs, olds: Arrays, g: Array, news: Arrays, free: Arrays, scalars: Arrays
) -> list[Launch]:
    """Return Loshchilov & Hutter (2019), algorithm 2, in torch's form with t = step + 1.

    p -= lr wd p; p -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps). The last term is
    computed as (lr s / (1 - b1^t)) * m / (sqrt(v) + eps s) with s = sqrt(1 - b2^t): one pass less.
    """
    (p, m, v), (p_out, m_out, v_out), t = olds, news, free[0]
    rate, eps, keep = scalars
    b1, b2 = number(attrs, "beta1"), number(attrs, "beta2")
    c1, d1, c2, d2 = [np.array(value, p.dtype) for value in (b1, 1.0 - b1, b2, 1.0 - b2)]
    decays = number(attrs, "weight_decay") != 0.0
    decayed = [partial(np.multiply, p, keep, out=p_out)] if decays else []
    return [
        partial(np.multiply, g, d1, out=t),
        partial(np.multiply, m, c1, out=m_out),
        partial(np.add, m_out, t, out=m_out),
        partial(np.multiply, g, d2, out=t),  # first: g * g may overflow where this does not
        partial(np.multiply, t, g, out=t),
        partial(np.multiply, v, c2, out=v_out),
        partial(np.add, v_out, t, out=v_out),
        partial(np.sqrt, v_out, out=t),
        partial(np.add, t, eps, out=t),
        partial(np.divide, m_out, t, out=t),
        partial(np.multiply, t, rate, out=t),
        *decayed,
        partial(np.subtract, p_out if decays else p, t, out=p_out),
    ]


def _adamw_coefficients(attrs: Attrs, rates: Arrays, scalars: Arrays) -> Launch:
    (lr, step), (rate, eps, keep) = rates, scalars
    b1, b2 = number(attrs, "beta1"), number(attrs, "beta2")
    epsilon, decay = number(attrs, "eps"), number(attrs, "weight_decay")

    def launch() -> None:
        t, rate_now = int(step) + 1, float(lr)
        correction = math.sqrt(1.0 - b2**t)
        rate.fill(rate_now * correction / (1.0 - b1**t))
        eps.fill(epsilon * correction)
        keep.fill(1.0 - rate_now * decay)

    return launch


@dataclass(frozen=True, slots=True)
class AccumulateKernel:
    """`accumulate`(sum, grad, batch) -> sum'; attrs every.

    The first of every `every` batches overwrites the sum, the others add to it.
    """

    name: str = "numpy.accumulate"
    op: str = "accumulate"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take floats."""
        if not inputs[0].type.dtype.is_float or has_bfloat16(inputs):
            return None
        total = inputs[0]
        strides = (total.strides_bytes, inputs[1].strides_bytes, outputs[0].strides_bytes)
        work = over_operands(total.shape, strides, [total.dtype.itemsize] * 3)
        return cost.needs(inputs, outputs, work, in_place=((0, 0),))

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the launch: one copy or one addition."""
        (total, grad, batch), (out,) = inputs, outputs
        every = int(number(attrs, "every"))
        first, other = partial(np.copyto, out, grad), partial(np.add, total, grad, out=out)

        def launch() -> None:
            (other if batch.item() % every else first)()

        return launch


SGD = FlatUpdateKernel("sgd_update", 0, 1, 1, _sgd_passes, _sgd_rate, _sgd)

UPDATE_KERNELS = (
    IncrementKernel(),
    AccumulateKernel(),
    SGD,
    FlatUpdateKernel("momentum_update", 1, 1, 1, _sgd_passes, _sgd_rate, _sgd),
    FlatUpdateKernel("adamw_update", 2, 2, 3, _adamw_passes, _adamw_coefficients, _adamw),
)
