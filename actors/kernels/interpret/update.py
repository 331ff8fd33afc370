"""Updates of variables: optimizers and the step counter.

The outputs lie over the inputs (`writes` in the op table); each kernel is also right when they do
not. Walks over flat blocks; what changes per step (learning rate, bias corrections) is computed
in Python from the 0-d operands at each launch and written to 0-d scratch that the bound calls
read. A last operand `skip` that is not 0 leaves all as it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.attributes import flag, number
from actors.kernels.interpret.bfloat16 import has_bfloat16
from actors.kernels.interpret.blocks import block_elements, cut
from actors.kernels.kernel import Attrs, KernelNeeds, Operands, Workspace, in_sequence
from actors.kernels.scratch import Piece
from actors.kernels.work import Pass, Work, over_blocks, over_operands
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


@dataclass(frozen=True, slots=True)
class SgdKernel:
    """`sgd_update`(param, grad, lr) -> param'; attrs weight_decay.

    `momentum_update`(param, grad, buffer, lr) -> (param', buffer'); attrs momentum, nesterov,
    weight_decay. torch's semantics: g += weight_decay * p; buffer = momentum * buffer + g; with
    nesterov the step is g + momentum * buffer, else buffer; p -= lr * step (Sutskever et al.
    2013, section 2).
    """

    op: str
    has_buffer: bool

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"numpy.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take floats; scratch is two blocks and a scalar."""
        param = inputs[0]
        if not param.type.dtype.is_float or has_bfloat16(inputs):
            return None
        pairs = ((0, 0), (1, 2)) if self.has_buffer else ((0, 0),)
        terms = 1 + (number(attrs, "weight_decay") != 0.0)
        if self.has_buffer:
            terms += 1 + flag(attrs, "nesterov")
        passes = {Pass.SIMPLE: terms, Pass.PLAIN: terms}
        return cost.needs(
            inputs,
            outputs,
            over_blocks(param.type.num_elements, param.dtype.itemsize, passes),
            scratch.size_bytes(_pieces(param.type.num_elements, param.dtype, scalars=1)),
            pairs,
        )

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the launch over flat blocks."""
        inputs, skip = _parted(inputs, 4 if self.has_buffer else 3)
        param, dtype = inputs[0], inputs[0].dtype
        first, second, lr = scratch.carve(workspace, _pieces(param.size, dtype, scalars=1))
        decay = number(attrs, "weight_decay")
        calls: list[Launch] = [partial(np.copyto, lr, inputs[-1], casting="unsafe")]
        for block in cut((*inputs[:-1], *outputs), param.ndim, block_elements(dtype.itemsize)):
            p, g = block[0], block[1]
            t, u = scratch.window(first, p.shape), scratch.window(second, p.shape)
            if decay != 0.0:
                calls.append(partial(np.multiply, p, np.array(decay, dtype), out=t))
                calls.append(partial(np.add, t, g, out=t))
                g = t
            if self.has_buffer:
                g = _momentum(attrs, g, block[2], block[4], u, calls)
            calls.append(partial(np.multiply, g, lr, out=u))
            calls.append(partial(np.subtract, p, u, out=block[3] if self.has_buffer else block[2]))
        olds = (param, inputs[2]) if self.has_buffer else (param,)
        return _unless(skip, in_sequence(calls), olds, outputs)


def _momentum(
    attrs: Attrs, g: Array, buffer: Array, out: Array, u: Array, calls: list[Launch]
) -> Array:
    """Add the calls that update the buffer; return where the step lies."""
    momentum = np.array(number(attrs, "momentum"), g.dtype)
    calls.append(partial(np.multiply, buffer, momentum, out=out))
    calls.append(partial(np.add, out, g, out=out))
    if not flag(attrs, "nesterov"):
        return out
    calls.append(partial(np.multiply, out, momentum, out=u))
    calls.append(partial(np.add, u, g, out=u))
    return u


@dataclass(frozen=True, slots=True)
class AdamwKernel:
    """`adamw_update`(param, grad, m, v, lr, step) -> (param', m', v').

    Attrs beta1, beta2, eps, weight_decay. Loshchilov & Hutter (2019), algorithm 2, in torch's
    form with t = step + 1: p -= lr wd p; p -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) +
    eps). The last term is computed as (lr s / (1 - b1^t)) * m / (sqrt(v) + eps s) with s = sqrt(1
    - b2^t): one pass less.
    """

    name: str = "numpy.adamw_update"
    op: str = "adamw_update"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take floats; scratch is two blocks and three scalars."""
        param = inputs[0]
        if not param.type.dtype.is_float or has_bfloat16(inputs):
            return None
        simple = 7 + (number(attrs, "weight_decay") != 0.0)
        passes = {Pass.SIMPLE: simple, Pass.PLAIN: 3, Pass.ROOT: 1, Pass.DIVIDE: 1}
        return cost.needs(
            inputs,
            outputs,
            over_blocks(param.type.num_elements, param.dtype.itemsize, passes, small_calls=4),
            scratch.size_bytes(_pieces(param.type.num_elements, param.dtype, scalars=3)),
            ((0, 0), (1, 2), (2, 3)),
        )

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the launch: the step's coefficients, then the flat blocks."""
        inputs, skip = _parted(inputs, 6)
        param, dtype = inputs[0], inputs[0].dtype
        lr, step = inputs[-2:]
        first, _, *scalars = scratch.carve(workspace, _pieces(param.size, dtype, scalars=3))
        calls = [_adamw_coefficients(attrs, lr, step, *scalars)]
        decays = number(attrs, "weight_decay") != 0.0
        for block in cut((*inputs[:4], *outputs), param.ndim, block_elements(dtype.itemsize)):
            t = scratch.window(first, block[0].shape)
            calls += _adamw_block(attrs, block, t, scalars, decays)
        return _unless(skip, in_sequence(calls), (param, *inputs[2:4]), outputs)


def _adamw_block(
    attrs: Attrs, block: Arrays, t: Array, scalars: list[Array], decays: bool
) -> tuple[Launch, ...]:
    p, g, m, v, p_out, m_out, v_out = block
    rate, eps, keep = scalars
    b1, b2 = number(attrs, "beta1"), number(attrs, "beta2")
    c1, d1, c2, d2 = [np.array(value, p.dtype) for value in (b1, 1.0 - b1, b2, 1.0 - b2)]
    decayed = (partial(np.multiply, p, keep, out=p_out),) if decays else ()
    return (
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
    )


def _adamw_coefficients(
    attrs: Attrs, lr: Array, step: Array, rate: Array, eps: Array, keep: Array
) -> Launch:
    b1, b2 = number(attrs, "beta1"), number(attrs, "beta2")
    epsilon, decay = number(attrs, "eps"), number(attrs, "weight_decay")

    def launch() -> None:
        t, rate_now = int(step) + 1, float(lr)
        correction = math.sqrt(1.0 - b2**t)
        rate.fill(rate_now * correction / (1.0 - b1**t))
        eps.fill(epsilon * correction)
        keep.fill(1.0 - rate_now * decay)

    return launch


def _parted(inputs: Arrays, count: int) -> tuple[Arrays, Array | None]:
    """Return the operands of an update, and `skip` if it is there."""
    return inputs[:count], inputs[count] if len(inputs) > count else None


def _unless(skip: Array | None, update: Launch, olds: Arrays, news: Arrays) -> Launch:
    """Return the update, or one that keeps the old values where `skip` is not 0."""
    if skip is None:
        return update
    apart = [pair for pair in zip(news, olds, strict=True) if not np.may_share_memory(*pair)]
    keep = in_sequence([partial(np.copyto, new, old) for new, old in apart])

    def launch() -> None:
        (keep if skip.item() else update)()

    return launch


def _pieces(elements: int, dtype: np.dtype[np.generic], *, scalars: int) -> tuple[Piece, ...]:
    """Return two blocks and some scalars."""
    shape = (min(elements, block_elements(dtype.itemsize)),)
    return (Piece(shape, dtype), Piece(shape, dtype), *[Piece((), dtype)] * scalars)


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


UPDATE_KERNELS = (
    IncrementKernel(),
    AccumulateKernel(),
    SgdKernel("sgd_update", has_buffer=False),
    SgdKernel("momentum_update", has_buffer=True),
    AdamwKernel(),
)
