"""Operators of ONNX that run a graph, and recurrent layers: If, Loop, Scan, RNN, GRU, LSTM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import actorflow.functional as af
from actorflow.onnx.arranging import axis_of
from actorflow.onnx.program import OnnxGraph, Operand, StepCall, Value, taking
from actorflow.tensor.tensor import Tensor, as_tensor

# ONNX's names of operands are capital letters; so are these.
# ruff: noqa: N803, N806

MOST_TURNS = 10**8
"""Turns of a loop: a file of 200 bytes may ask for 10^15, which is for ever."""

State = tuple[Tensor, ...]


def _results(made: Sequence[Value]) -> State:
    return tuple([as_tensor(value) for value in made])


def _if(cond: Operand, *, then_branch: OnnxGraph, else_branch: OnnxGraph, step: StepCall) -> State:
    if isinstance(cond, np.ndarray):
        return step.run(then_branch if cond.reshape(()) else else_branch)

    def branch(block: OnnxGraph) -> Callable[[], State]:
        return lambda: _results(step.run(block))

    made: State = af.cond(cond.reshape(()), branch(then_branch), branch(else_branch))
    return made


@taking("scan_input_axes", "scan_input_directions", "scan_output_axes", "scan_output_directions")
def _scan(
    *inputs: Tensor, body: OnnxGraph, num_scan_inputs: int, step: StepCall, **how: Any
) -> State:
    count = len(inputs) - num_scan_inputs
    if step.opset < 9 or count < 0:
        step.refuse("known is this operator of opset 9 and later, of as many inputs as it scans")
    xs: list[Tensor] = []
    axes = how.get("scan_input_axes", [0] * num_scan_inputs)
    turns = how.get("scan_input_directions", [0] * num_scan_inputs)
    for x, axis, is_turned in zip(inputs[count:], axes, turns, strict=True):
        moved = af.movedim(x, axis_of(axis, x.ndim, step), 0)
        xs.append(af.flip(moved, 0) if is_turned else moved)

    def turn(carry: State, entry: State) -> tuple[State, State]:
        made = _results(step.run(body, *carry, *entry))
        return made[:count], made[count:]

    last, ys = af.scan(turn, tuple(inputs[:count]), tuple(xs))
    axes = how.get("scan_output_axes", [0] * len(ys))
    turns = how.get("scan_output_directions", [0] * len(ys))
    placed = [
        af.movedim(af.flip(y, 0) if is_turned else y, 0, axis_of(axis, y.ndim, step))
        for y, axis, is_turned in zip(ys, axes, turns, strict=True)
    ]
    return *last, *placed


def _loop(
    M: Operand | None, cond: Operand | None, *carried: Tensor, body: OnnxGraph, step: StepCall
) -> State:
    count = len(carried)
    num_stacked = len(body.outputs) - 1 - count
    is_counted = isinstance(M, np.ndarray) and (cond is None or isinstance(cond, np.ndarray))
    turns = int(M.reshape(())) if isinstance(M, np.ndarray) else None
    if turns is not None and turns > MOST_TURNS:
        step.refuse(f"has {turns:,} turns, more than {MOST_TURNS:,}")
    if is_counted and turns is not None and (cond is None or bool(cond.reshape(()))):
        made = _counted(max(turns, 0), carried, body, step)
        if made is not None:
            return made
    if num_stacked:
        step.refuse("stacks what each turn gives, and how many turns there are depends on data")
    limit = as_tensor(np.asarray(MOST_TURNS, np.int64) if M is None else M).reshape(())
    goes = as_tensor(np.asarray(True) if cond is None else cond).reshape(())

    def turn(state: Any) -> Any:
        at, _, *now = state
        again, *new = _results(step.run(body, at, np.asarray(True), *now))
        return (at + 1, again.reshape(()), *new)

    start = (as_tensor(np.asarray(0, np.int64)), goes, *carried)
    last = af.while_loop(lambda s: af.logical_and(s[1], s[0] < limit), turn, start)
    return tuple(last[2:])


def _counted(
    turns: int, carried: tuple[Tensor, ...], body: OnnxGraph, step: StepCall
) -> State | None:
    """Return the results of a loop of so many turns; None where a turn may end it."""
    is_endless = True

    def turn(carry: State, at: Tensor) -> tuple[State, State]:
        nonlocal is_endless
        again, *made = step.run(body, at, np.asarray(True), *carry)
        is_endless = is_endless and isinstance(again, np.ndarray) and bool(again.reshape(()))
        new = _results(made)
        return new[: len(carry)], new[len(carry) :]

    numbers = as_tensor(np.arange(turns, dtype=np.int64)) if turns <= 1 << 20 else None
    if numbers is None:
        return None
    last, stacked = af.scan(turn, carried, numbers)
    return (*last, *stacked) if is_endless else None


# Recurrent layers: their gates are in another order than torch's and ours.

RecurrentStep = Callable[[Tensor, State, Tensor, Tensor | None], State]


def _rnn_cell(x: Tensor, state: State, R: Tensor, bias: Tensor | None) -> State:
    gates = x + state[0] @ R.T
    return (af.tanh(gates if bias is None else gates + bias),)


def _lstm_cell(x: Tensor, state: State, R: Tensor, bias: Tensor | None) -> State:
    gates = x + state[0] @ R.T
    i, o, f, c = af.chunk(gates if bias is None else gates + bias, 4, -1)
    cell = af.sigmoid(f) * state[1] + af.sigmoid(i) * af.tanh(c)
    return af.sigmoid(o) * af.tanh(cell), cell


def _gru_cell(before: bool) -> RecurrentStep:
    def cell(x: Tensor, state: State, R: Tensor, bias: Tensor | None) -> State:
        h, width = state[0], R.shape[1]
        b = (0.0, 0.0) if bias is None else (bias[: 2 * width], bias[2 * width :])
        z, r = af.chunk(af.sigmoid(x[:, : 2 * width] + h @ R[: 2 * width].T + b[0]), 2, -1)
        if before:  # torch's: the reset gate multiplies the product
            new = af.tanh(x[:, 2 * width :] + r * (h @ R[2 * width :].T + b[1]))
        else:
            new = af.tanh(x[:, 2 * width :] + (r * h) @ R[2 * width :].T + b[1])
        return ((1.0 - z) * new + z * h,)

    return cell


def _recurrent(
    cell: RecurrentStep, given: Sequence[Any], firsts: Sequence[Any], step: StepCall
) -> State:
    """Return Y, and the last state of each kind, of one or two directions."""
    X, W, R, B, lengths = given
    how = step.step.attributes
    for name in ("activation_alpha", "activation_beta", "activations", "clip", "input_forget"):
        if how.get(name):
            step.refuse(f"has {name}; known are the default activations")
    direction, layout = how.get("direction", "forward"), how.get("layout", 0)
    hidden = R.shape[-1]
    if direction not in ("forward", "reverse", "bidirectional"):
        step.refuse(f"has direction {direction!r}")
    if lengths is not None and direction != "forward":
        step.refuse("has sequence_lens and runs backwards, which is not known together")
    x = X.swapaxes(0, 1) if layout else X
    outputs: list[Tensor] = []
    lasts: list[State] = []
    for at in range(W.shape[0]):
        product = x @ W[at].T
        bias = None
        if B is not None:
            product, bias = product + B[at, : B.shape[1] // 2], B[at, B.shape[1] // 2 :]
        shape = (x.shape[1], hidden)
        zero = as_tensor(np.zeros((), x.dtype.value)).broadcast_to(*shape)
        along = 1 if layout else 0  # the axis of directions
        state = tuple([zero if h is None else af.select(h, along, at) for h in firsts])
        is_turned = direction == "reverse" or at == 1
        y, last = _run(cell, (product, R[at], bias, lengths), state, is_turned)
        outputs.append(y)
        lasts.append(last)
    Y = af.stack(outputs, 1)  # [steps, directions, batch, hidden]
    ends = [af.stack(list(kind), 0) for kind in zip(*lasts, strict=True)]
    if layout:
        return Y.permute(2, 0, 1, 3), *[end.swapaxes(0, 1) for end in ends]
    return Y, *ends


def _run(
    cell: RecurrentStep, given: tuple[Any, ...], first: State, is_turned: bool
) -> tuple[Tensor, State]:
    product, R, bias, lengths = given
    numbers = as_tensor(np.arange(product.shape[0], dtype=np.int64))

    def turn(state: State, entry: Any) -> tuple[State, Tensor]:
        x, at = entry
        new = cell(x, state, R, bias)
        if lengths is None:
            return new, new[0]
        is_in = (at < lengths.to("int64")).reshape(-1, 1)
        kept = tuple([af.where(is_in, n, s) for n, s in zip(new, state, strict=True)])
        return kept, af.where(is_in, new[0], 0.0)

    last, y = af.scan(turn, first, (product, numbers), reverse=is_turned)
    return y, last


_RECURRENT = (
    *("activation_alpha", "activation_beta", "activations", "clip", "direction"),
    *("hidden_size", "input_forget", "layout", "linear_before_reset"),
)


def _of_one_state(cell_of: Callable[[dict[str, Any]], RecurrentStep]) -> Callable[..., State]:
    """Return the operator of a layer whose cell follows from the attributes."""

    @taking(*_RECURRENT)
    def operator(
        X: Tensor,
        W: Tensor,
        R: Tensor,
        B: Tensor | None = None,
        sequence_lens: Tensor | None = None,
        initial_h: Tensor | None = None,
        *,
        step: StepCall,
        **how: Any,
    ) -> State:
        return _recurrent(cell_of(how), (X, W, R, B, sequence_lens), (initial_h,), step)

    return operator


@taking(*_RECURRENT)
def _lstm(
    X: Tensor,
    W: Tensor,
    R: Tensor,
    B: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    *more: Tensor,
    step: StepCall,
    **how: Any,
) -> State:
    initial_h, initial_c, P = (*more, None, None, None)[:3]
    if P is not None:
        step.refuse("has peepholes (P), which are not known")
    return _recurrent(_lstm_cell, (X, W, R, B, sequence_lens), (initial_h, initial_c), step)


CONTROL: dict[str, Callable[..., Any]] = {
    "GRU": _of_one_state(lambda how: _gru_cell(bool(how.get("linear_before_reset")))),
    "If": _if,
    "LSTM": _lstm,
    "Loop": _loop,
    "RNN": _of_one_state(lambda how: _rnn_cell),
    "Scan": _scan,
}
