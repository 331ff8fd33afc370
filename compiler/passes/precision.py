"""Let products read 16-bit floats, and what lies between them live so; all else stays float32.

    y = matmul(x, w)  ->  y = matmul(cast(x), cast(w)), or with out_dtype float32

What each op does is a column (`compiler.ops.precision`). Low is bfloat16 or float16, one for the
job. Which values become low is decided in two walks. Forward: products make low values, and so does
an op that follows, when its inputs of full size are so; narrower ones, a bias, come along, as a
weight does, but a constant only when the low type has its number. Backward: a value that nobody
reads as low stays float32. A weight's gradient, logits and the branches of a residual sum so leave
their product unrounded.

A value is rounded at most once per batch, where it is made or where it is first wanted: all its
readers share the cast, forward and backward. Roundings stand before views that do not make a value
smaller, so that a weight and its transpose share one, too. Variables, their gradients, statistics
and outputs of the job keep their types: a checkpoint does not tell in which precision it was made.

Guarantees: variables and roots have the types they had; no cast of the pass reads another one's
result, and no value is cast twice to one type; phases are kept, and scopes and sources.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from compiler.attrs import Attrs
from compiler.bfloat16 import decoded, encoded
from compiler.graph import Graph, GraphBuilder, Node
from compiler.ops.elementwise import cast_to
from compiler.ops.precision import Precision, Width, precision
from compiler.ops.sources import CONSTANT, constant_array
from compiler.prune import prune
from compiler.registry import infer_type, view
from compiler.types import DType, TensorType, ValueId

_UNKNOWN = ValueId(-1)


def run(graph: Graph, low: DType = DType.BFLOAT16) -> Graph:
    """Return the graph with its products in a type of 16 bits. O(nodes)."""
    widths = tuple([_width_of(graph, node, low) for node in graph.nodes])
    if not any([width.width is Width.LOW for width in widths]):
        return graph
    is_low = _read_as_low(graph, widths, _made_as_low(graph, widths, low))
    return prune(_PrecisionCopy(graph, widths, is_low, low).run())


def _width_of(graph: Graph, node: Node, low: DType) -> Precision:
    """Return what the column says of a node; one with floats of another width is left alone."""
    fact = precision.get(node.op)
    if fact.width is Width.HIGH:
        return fact
    if fact.needs_range and low is DType.FLOAT16:
        return Precision(Width.HIGH)
    floats = [graph.types[v].dtype for v in node.inputs if graph.types[v].dtype.is_float]
    is_ours = bool(floats) and all([dtype is DType.FLOAT32 for dtype in floats])
    return fact if is_ours else Precision(Width.HIGH)


def _float_inputs(graph: Graph, node: Node) -> list[ValueId]:
    return [v for v in node.inputs if graph.types[v].dtype is DType.FLOAT32]


def _low_inputs(graph: Graph, node: Node, fact: Precision) -> list[ValueId]:
    """Return the inputs that a LOW op reads as low."""
    is_float = [graph.types[v].dtype is DType.FLOAT32 for v in node.inputs]
    return [v for i, v in enumerate(node.inputs) if is_float[i] and i not in fact.kept]


def _made_as_low(graph: Graph, widths: tuple[Precision, ...], low: DType) -> list[bool]:
    """Return, per value, whether it would be low if somebody reads it so."""
    is_low = [False] * len(graph.types)
    fits: dict[ValueId, bool] = {}
    for node, fact in zip(graph.nodes, widths, strict=True):
        if node.op is CONSTANT and graph.types[node.outputs[0]].dtype is DType.FLOAT32:
            array = constant_array(node)
            kept = decoded(encoded(array, low), low).reshape(array.shape)
            fits[node.outputs[0]] = bool(np.array_equal(array, kept, equal_nan=True))
        elif fact.width is Width.LOW:
            for value, type_ in zip(node.outputs, _low_types(graph, node, fact, low), strict=True):
                is_low[value] = type_.dtype is low
        elif fact.width is Width.FOLLOW:
            if view.has(node.op) and node.inputs[0] in fits:
                fits[node.outputs[0]] = fits[node.inputs[0]]
            deciding = _deciding(graph, node, fits)
            if deciding and all([is_low[v] for v in deciding]):
                for value in node.outputs:
                    is_low[value] = True
    return is_low


def _low_types(graph: Graph, node: Node, fact: Precision, low: DType) -> tuple[TensorType, ...]:
    """Return the output types of a LOW op on low inputs."""
    lowered = _low_inputs(graph, node, fact)
    types = [graph.types[v] for v in node.inputs]
    for index, value in enumerate(node.inputs):
        if value in lowered and index not in fact.kept:
            types[index] = replace(types[index], dtype=low)
    return infer_type.get(node.op)(tuple(types), node.attrs)


def _deciding(graph: Graph, node: Node, fits: dict[ValueId, bool]) -> list[ValueId]:
    """Return the inputs that decide what a following op computes in.

    Those as large as the result, and all where none is; a constant always, unless the low type
    has its numbers: then never.
    """
    voting = [v for v in _float_inputs(graph, node) if not fits.get(v, False)]
    size = graph.types[node.outputs[0]].num_elements
    full = [v for v in voting if v in fits or graph.types[v].num_elements == size]
    return full or voting


def _read_as_low(graph: Graph, widths: tuple[Precision, ...], is_low: list[bool]) -> list[bool]:
    """Return `is_low` without the values that nobody reads as low, where there is a choice."""
    is_wanted = [False] * len(graph.types)
    for node, fact in zip(reversed(graph.nodes), reversed(widths), strict=True):
        if fact.width is Width.LOW:
            if fact.chooses_output and not is_wanted[node.outputs[0]]:
                is_low[node.outputs[0]] = False
            for value in _low_inputs(graph, node, fact):
                is_wanted[value] = True
        elif fact.width is Width.FOLLOW and is_low[node.outputs[0]]:
            stays = any([is_wanted[v] for v in node.outputs])
            for value in node.outputs:
                is_low[value] = stays
            for value in _float_inputs(graph, node) if stays else ():
                is_wanted[value] = True
    return is_low


class _PrecisionCopy:
    """One copy of a graph; a float32 value of the old one has up to two in the new one."""

    def __init__(
        self, graph: Graph, widths: tuple[Precision, ...], is_low: list[bool], low: DType
    ) -> None:
        self.low_type = low
        self.graph = graph
        self.widths = widths
        self.is_low = is_low
        self.producers = graph.producers()
        self.b = GraphBuilder()
        self.wide: list[ValueId] = [_UNKNOWN] * len(graph.types)
        self.low: list[ValueId] = [_UNKNOWN] * len(graph.types)

    def run(self) -> Graph:
        for node, fact in zip(self.graph.nodes, self.widths, strict=True):
            with self.b.beside(node):
                self._copy(node, fact)
        for value in self.graph.roots():
            node = self.graph.nodes[self.producers[value]]
            with self.b.beside(node):
                self._as(value, DType.FLOAT32)
        return self.b.freeze_as(self.graph, self.wide)

    def _copy(self, node: Node, fact: Precision) -> None:
        """Copy a node on inputs of the types it wants."""
        is_low = self.is_low[node.outputs[0]]
        if fact.width is not Width.LOW and not is_low:
            inputs = tuple([self._as(v, DType.FLOAT32) for v in node.inputs])
            outputs = self.b.copy(node, inputs, [self.graph.types[v] for v in node.outputs])
        else:
            kept, attrs = fact.kept, node.attrs
            inputs = tuple(
                [
                    self._as(v, DType.FLOAT32 if i in kept else self.low_type)
                    for i, v in enumerate(node.inputs)
                ]
            )
            if fact.chooses_output and not is_low:
                attrs = Attrs({**attrs, "out_dtype": DType.FLOAT32.value})
            outputs = self.b.emit(node.op, inputs, attrs)
        for old, new in zip(node.outputs, outputs, strict=True):
            self._home(old, new)[old] = new

    def _home(self, old: ValueId, new: ValueId) -> list[ValueId]:
        """Return where a new value belongs: `low` if it is a float32 value's rounded form."""
        was, is_ = self.graph.types[old].dtype, self.b.type_of(new).dtype
        return self.low if is_ is not was else self.wide

    def _as(self, value: ValueId, dtype: DType) -> ValueId:
        """Return a float32 value in the new graph as it is wanted, any other as it is."""
        if self.graph.types[value].dtype is not DType.FLOAT32:
            return self.wide[value]
        known, other = (self.low, self.wide) if dtype is self.low_type else (self.wide, self.low)
        passed: list[Node] = []
        while known[value] == _UNKNOWN:
            node = self.graph.nodes[self.producers[value]]
            if dtype is DType.FLOAT32 or not self._is_passed(node):
                with self.b.on(node.device):  # all readers share it, on whatever devices
                    known[value] = self._converted(node, other[value], dtype)
                break
            passed.append(node)
            value = node.inputs[0]
        made = known[value]
        for node in reversed(passed):
            with self.b.on(node.device):
                made = self.b.one(node.op, made, **node.attrs)
            known[node.outputs[0]] = made
        return made

    def _is_passed(self, node: Node) -> bool:
        """Whether a rounding stands before a node: a view that makes its input no smaller."""
        if not view.has(node.op) or precision.get(node.op).width is not Width.FOLLOW:
            return False
        (x,), (y,) = node.inputs, node.outputs
        return self.graph.types[x].num_elements <= self.graph.types[y].num_elements

    def _converted(self, node: Node, value: ValueId, dtype: DType) -> ValueId:
        if node.op is not CONSTANT:
            return cast_to(self.b, value, dtype)
        data = encoded(constant_array(node), dtype)
        return self.b.one(CONSTANT, **{**node.attrs, "dtype": dtype.value, "data": data})
