"""Recurrent layers: RNN, LSTM and GRU of several layers and both directions, and their cells.

Names, arguments and initialisers are torch's. A layer is a scan (`functional.control`) over what
its input products give for all steps at once: so a step is one product, with the state, and one
kernel of all that is elementwise. Of 16-bit floats it computes in float32 (`tensor.op_math`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from actorflow.functional import activation, arranging, control, dense, elementwise, shape
from actorflow.functional.random import checked_probability, dropout
from actorflow.nn.layers import MOST_LAYERS, checked_extent
from actorflow.nn.module import Module
from actorflow.nn.parameter import Parameter
from actorflow.tensor.literals import checked_size, result_type
from actorflow.tensor.op_math import rounded, widened
from actorflow.tensor.tensor import Tensor, as_tensor
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.contract.types import DType, TensorType

State = tuple[Tensor, ...]
"""What a step hands to the next: h [batch, hidden], and c of an LSTM."""

_NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")

Weights = dict[str, Tensor]
"""The weights of a direction of a layer, by their names without its suffix."""


def _tanh_step(given: Tensor, state: State, w: Weights) -> State:
    return (activation.tanh(given + dense.linear(state[0], w["weight_hh"])),)


def _relu_step(given: Tensor, state: State, w: Weights) -> State:
    return (activation.relu(given + dense.linear(state[0], w["weight_hh"])),)


def _lstm_step(given: Tensor, state: State, w: Weights) -> State:
    h, c = state
    # Cut before they are added: so all that follows the product has one shape, and is one kernel.
    parts = [shape.chunk(sums, 4, -1) for sums in (given, dense.linear(h, w["weight_hh"]))]
    i, f, g, o = [before + after for before, after in zip(*parts, strict=True)]
    c = activation.sigmoid(f) * c + activation.sigmoid(i) * activation.tanh(g)
    h = activation.sigmoid(o) * activation.tanh(c)
    return dense.linear(h, w["weight_hr"]) if "weight_hr" in w else h, c


def _gru_step(given: Tensor, state: State, w: Weights) -> State:
    (h,) = state
    # The bias is added to each part, not to whole rows: see the LSTM.
    parts = list(shape.chunk(dense.linear(h, w["weight_hh"]), 3, -1))
    if "bias_hh" in w:
        parts = [part + b for part, b in zip(parts, shape.chunk(w["bias_hh"], 3), strict=True)]
    r, z, n = shape.chunk(given, 3, -1)
    r, z = activation.sigmoid(r + parts[0]), activation.sigmoid(z + parts[1])
    n = activation.tanh(n + r * parts[2])
    return (n + z * (h - n),)


@dataclass(frozen=True, slots=True)
class _StepRule:
    """What makes a layer an RNN, LSTM or GRU.

    `step` takes what the input products give, the state and the weights, and returns the next
    state; `adds_biases_before` says that it only ever adds `bias_hh` to the former.
    """

    num_gates: int
    num_states: int
    step: Callable[[Tensor, State, Weights], State]
    adds_biases_before: bool = True


_RNNS = {"tanh": _StepRule(1, 1, _tanh_step), "relu": _StepRule(1, 1, _relu_step)}


class _Recurrent(Module):
    """What cells and layers have in common: weights named by a suffix, and what they compute."""

    _rule: _StepRule
    hidden_size: int
    bias: bool

    def _choose(self, nonlinearity: str) -> None:
        if nonlinearity not in _RNNS:
            raise CompileError(
                f"{find_source()}: nonlinearity of {type(self).__name__} must be 'tanh' or 'relu',"
                f" got {nonlinearity!r}"
            )
        self._rule, self.nonlinearity = _RNNS[nonlinearity], nonlinearity

    def _make_weights(self, suffix: str, fan_in: int, out: int) -> None:
        """Make the weights of one direction of a layer, whose h is `out` wide, in torch's order."""
        rows = self._rule.num_gates * self.hidden_size
        init = (("kind", "uniform"), ("bound", 1.0 / math.sqrt(self.hidden_size)))
        extents: list[tuple[int, ...]] = [(rows, fan_in), (rows, out)]
        extents += [(rows,) if self.bias else ()] * 2
        extents += [(out, self.hidden_size) if out != self.hidden_size else ()]
        for name, size in zip(_NAMES, extents, strict=True):
            if size:
                setattr(self, name + suffix, Parameter(size, init))

    def _weights(self, suffix: str) -> Weights:
        weights = {name: getattr(self, name + suffix, None) for name in _NAMES}
        return {n: widened(as_tensor(w)) for n, w in weights.items() if w is not None}

    def _products(self, x: Tensor, w: Weights) -> Tensor:
        """Return x [..., in] by the input weights, with all biases that can be added before."""
        bias = w.get("bias_ih")
        if bias is not None and self._rule.adds_biases_before:
            bias = bias + w["bias_hh"]
        return dense.linear(x, w["weight_ih"], bias)

    def _given(self, hx: Any, types: list[TensorType]) -> State:
        """Return a first state of some types as tensors of at least float32, or zeros for None."""
        if hx is None:
            return tuple([widened(arranging.zeros(t.shape, dtype=t.dtype)) for t in types])
        listed = hx if len(types) > 1 and isinstance(hx, (tuple, list)) else (hx,)
        states = tuple([as_tensor(s) for s in listed])
        if [s.type for s in states] != types:
            raise CompileError(
                f"{find_source()}: the first state of {type(self).__name__} is"
                f" {', '.join(map(str, types))}, got {', '.join([str(s.type) for s in states])}"
            )
        return tuple([widened(s) for s in states])


class _Layers(_Recurrent):
    """Several layers of one or two directions."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
    ) -> None:
        name = type(self).__name__
        self.input_size = checked_extent(name, "input_size", input_size)
        self.hidden_size = checked_extent(name, "hidden_size", hidden_size)
        self.num_layers = checked_extent(name, "num_layers", num_layers, MOST_LAYERS)
        self.bias, self.batch_first = bool(bias), bool(batch_first)
        self.dropout, self.bidirectional = checked_probability(dropout), bool(bidirectional)
        self.proj_size = checked_size(proj_size, f"proj_size of {name}")
        if not 0 <= self.proj_size < (self.hidden_size if self._rule.num_states > 1 else 1):
            raise CompileError(
                f"{find_source()}: proj_size must be 0 or more and below hidden_size"
                f" {self.hidden_size} in an LSTM, and 0 in other layers; got {proj_size} for"
                f" {name}"
            )
        fan_in, out = self.input_size, self.proj_size or self.hidden_size
        for layer in range(self.num_layers):
            for suffix in self._suffixes(layer):
                self._make_weights(suffix, fan_in, out)
            fan_in = out * (1 + self.bidirectional)

    def _suffixes(self, layer: int) -> list[str]:
        """Return the ends of the names of a layer's weights, a direction each."""
        return [f"_l{layer}{end}" for end in ("", "_reverse")[: 1 + self.bidirectional]]

    def __call__(self, x: Tensor, hx: Any = None, *, lengths: Any = None) -> tuple[Tensor, Any]:
        """Return the output [steps, batch, directions * hidden], and the states after last steps.

        Args:
            x: [steps, batch, input_size], or [steps, input_size] of one sequence.
            hx: the first state h [layers * directions, batch, hidden], of an LSTM a pair (h, c); or
                None for zeros. What is returned beside the output has the same form.
            lengths: integers [batch]: steps from there on are none. The output is zero there,
                the last state that of the last step before, and the direction that goes back begins
                there: what torch does by `pack_padded_sequence`. None where all are whole.

        Raises CompileError for other shapes.
        """
        x, is_single = as_tensor(x), as_tensor(x).ndim == 2
        if x.ndim not in (2, 3) or x.shape[-1] != self.input_size:
            axes = "batch, steps" if self.batch_first else "steps, batch"
            raise CompileError(
                f"{find_source()}: {type(self).__name__} takes [{axes}, {self.input_size}], or"
                f" [steps, {self.input_size}], got {x.type}"
            )
        x = shape.unsqueeze(x, 1) if is_single else x.transpose(0, 1) if self.batch_first else x
        count, widths = self.num_layers * (1 + self.bidirectional), [self.hidden_size] * 2
        widths[0] = self.proj_size or self.hidden_size
        rows = () if is_single else (x.shape[1],)
        types = [TensorType(x.dtype, (count, *rows, w)) for w in widths[: self._rule.num_states]]
        x, dtype = widened(x), result_type([x, vars(self)["weight_ih_l0"]])
        firsts = [s.reshape(count, x.shape[1], s.shape[-1]) for s in self._given(hx, types)]
        x, lasts = self._run(x, firsts, None if lengths is None else self._seen(x, lengths))
        parts = zip(lasts, types, strict=True)
        states = tuple([shape.stack(layers).reshape(*type_.shape) for layers, type_ in parts])
        x, states = rounded(x, dtype), tuple([rounded(s, dtype) for s in states])
        output = x[:, 0] if is_single else x.transpose(0, 1) if self.batch_first else x
        return output, states if len(states) > 1 else states[0]

    def _run(
        self, x: Tensor, firsts: list[Tensor], seen: Tensor | None
    ) -> tuple[Tensor, list[list[Tensor]]]:
        """Return the output of the last layer, and per state the last ones of all layers."""
        lasts: list[list[Tensor]] = [[] for _ in firsts]
        for layer in range(self.num_layers):
            x = dropout(x, self.dropout) if layer and self.dropout else x
            outputs: list[Tensor] = []
            for suffix in self._suffixes(layer):
                first = tuple([state[len(lasts[0])] for state in firsts])
                last, hs = self._scan(x, first, seen, suffix)
                outputs.append(hs)
                for layers, state in zip(lasts, last, strict=True):
                    layers.append(state)
            x = shape.concat(outputs, -1) if len(outputs) > 1 else outputs[0]
        return x, lasts

    def _scan(
        self, x: Tensor, first: State, seen: Tensor | None, suffix: str
    ) -> tuple[State, Tensor]:
        """Return the last state of one direction, and h of all steps.

        Going back, a shorter sequence's state stays the first one until its own last entry comes.
        """
        weights = self._weights(suffix)

        def step(state: State, entry: tuple[Tensor, Tensor | None]) -> tuple[State, Tensor]:
            new = self._rule.step(entry[0], state, weights)
            if entry[1] is None:
                return new, new[0]
            merged = [elementwise.where(entry[1], n, s) for n, s in zip(new, state, strict=True)]
            return tuple(merged), elementwise.where(entry[1], new[0], 0.0)

        entries = self._products(x, weights), seen
        return control.scan(step, first, entries, reverse=suffix.endswith("_reverse"))

    def _seen(self, x: Tensor, lengths: Any) -> Tensor:
        """Return which steps of [steps, batch, 1] are within a sequence's length."""
        ends = as_tensor(lengths, DType.INT64)
        steps, rows, _ = x.shape
        if ends.shape != (rows,) or ends.dtype.is_float or ends.dtype is DType.BOOL:
            raise CompileError(
                f"{find_source()}: lengths of {type(self).__name__} are integers [{rows}], one per"
                f" sequence of the batch, got {ends.type}"
            )
        return arranging.arange(steps).reshape(steps, 1, 1) < ends.reshape(1, rows, 1)


class RNN(_Layers):
    """Layers h' = tanh(W x + U h + b), over sequences [steps, batch, input_size].

    Parameters are `weight_ih_l0`, `weight_hh_l0`, `bias_ih_l0`, `bias_hh_l0` and so on for each
    layer, and `..._reverse`; all start uniform in +-1/sqrt(hidden_size).

    Args:
        input_size: extent of an entry.
        hidden_size: extent of the state.
        num_layers: each takes the output of the one before.
        nonlinearity: "tanh" or "relu".
        rest: bias (whether biases are added); batch_first (x and the output are [batch, steps,
            ...]); dropout (probability of zeros in the output of all layers but the last, in
            training); bidirectional (a second direction goes from the last entry to the first; the
            output has both side by side).
        options: the same by name.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        *rest: Any,
        **options: Any,
    ) -> None:
        self._choose(nonlinearity)
        super().__init__(input_size, hidden_size, num_layers, *rest, **options)


class GRU(_Layers):
    """Gated recurrent units; parameters and starts are those of `RNN`, and arguments without one.

    h' = (1 - z) n + z h, with gates r, z and n = tanh(W x + b + r (U h + b')). The rows of weights
    are those of r, z, n.
    """

    _rule = _StepRule(3, 1, _gru_step, adds_biases_before=False)


class LSTM(_Layers):
    """Long short-term memory; parameters and starts are those of `RNN`, and arguments without one.

    c' = f c + i g, h' = o tanh(c'). The rows of weights are those of the gates i, f, g, o. With a
    `proj_size` h is narrowed by `weight_hr_l0` [proj_size, hidden_size] after each step.
    """

    _rule = _StepRule(4, 2, _lstm_step)


class _SingleStep(_Recurrent):
    """One step of one layer; parameters are `weight_ih`, `weight_hh`, `bias_ih`, `bias_hh`."""

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True) -> None:
        name = type(self).__name__
        self.input_size = checked_extent(name, "input_size", input_size)
        self.hidden_size, self.bias = checked_extent(name, "hidden_size", hidden_size), bool(bias)
        self._make_weights("", self.input_size, self.hidden_size)

    def __call__(self, x: Tensor, hx: Any = None) -> Any:
        """Return h [..., hidden] after a step, of an LSTM a pair (h, c).

        Args:
            x: [..., input_size].
            hx: the same before the step, or None for zeros.
        """
        x, weights = as_tensor(x), self._weights("")
        type_ = TensorType(x.dtype, (*x.shape[:-1], self.hidden_size))
        dtype = result_type([x, vars(self)["weight_ih"]])
        state = self._given(hx, [type_] * self._rule.num_states)
        states = self._rule.step(self._products(widened(x), weights), state, weights)
        states = tuple([rounded(s, dtype) for s in states])
        return states if len(states) > 1 else states[0]


class RNNCell(_SingleStep):
    """A step of `RNN`."""

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, nonlinearity: str = "tanh"
    ) -> None:
        self._choose(nonlinearity)
        super().__init__(input_size, hidden_size, bias)


class GRUCell(_SingleStep):
    """A step of `GRU`."""

    _rule = GRU._rule


class LSTMCell(_SingleStep):
    """A step of `LSTM`."""

    _rule = LSTM._rule
