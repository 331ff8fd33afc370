"""Precision: products read 16-bit floats, and what lies between them lives so; all else is float32.

    y = matmul(x, w)  ->  y = matmul(cast(x), cast(w)), or with out_dtype float32

What each op does is a column, `precision`. Low is bfloat16 or float16, one for the
job. Which values become low is decided in two walks. Forward: products make low values, and so does
an op that follows, when its inputs of full size are so; narrower ones, a bias, come along, as a
weight does, but a constant only when the low type has its number. Backward: a value that nobody
reads as low stays float32. A weight's gradient, logits and the branches of a residual sum so leave
their product unrounded. But on a device that moves more bytes than it can afford, what is wide
(`TilingPolicy.rounded_bytes`) is low, as torch's autocast has it: logits, on which a loss computes
in float32; what a batch norm, which computes in float32, makes of a product; and the gradient that
a ReLU lets through.

A value is rounded at most once per batch, where it is made or where it is first wanted: all its
readers share the cast, forward and backward. Roundings stand before views that do not make a value
smaller, so that a weight and its transpose share one, too. Variables, their gradients, statistics
and outputs of the job keep their types: a checkpoint does not tell in which precision it was made.

Guarantees: variables and roots have the types they had; no cast of the pass reads another one's
result, and no value is cast twice to one type; phases are kept, and scopes and sources.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

import numpy as np

from compiler.contract.attrs import Attrs, AttrValue
from compiler.contract.program import FusedProgram, Instruction, Kind, ProgramInput
from compiler.contract.types import DType, TensorType, ValueId, decoded, encoded
from compiler.fusion.join_updates import MergeableUpdate, merge_nodes, mergeable_update
from compiler.graph.graph import Graph, GraphBuilder, Node, Write, consumers, new_value, prune
from compiler.graph.registry import OpAttr, infer_type, view
from compiler.graph.target import Hardware
from compiler.ops.families import activation, arithmetic, attention, loss, normalisation
from compiler.ops.language.vjp import grad_op
from compiler.ops.primitives import convolution, matmul, shape, slicing
from compiler.ops.primitives.matmul import KEEPS_PRECISION
from compiler.ops.primitives.shape import CAST, cast_to
from compiler.ops.primitives.sources import (
    CONSTANT,
    DROPOUT,
    OF_MODEL,
    ROUNDED,
    VARIABLE,
    constant_array,
)
from compiler.ops.primitives.transfer import COPY_TO, TO_SBP

# How wide each op computes when a job asks for 16-bit floats.
#
# After torch's autocast on the CPU (Micikevicius et al., Mixed Precision Training, 2018, section
# 3): products read low values, what only moves or bends single elements takes what comes, and all
# else (sums, means, exponentials, softmax, norms, losses, updates) stays in float32. An op of
# another file says so itself, where it is registered; one that says nothing stays in float32. So
# does a product that no user called one, by its attribute: pooling and resizing are lowered to it.


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
    `reads_logits`: its first input may be low where that is wide; it computes in float32 on it.
    `rounds_wide`: its output, where that is wide, is low like its first input. A HIGH op rounds
    what it made in float32; that of a FOLLOW op is low although nobody reads it so.
    """

    width: Width
    kept: tuple[int, ...] = ()
    chooses_output: bool = False
    needs_range: bool = False
    reads_logits: bool = False
    rounds_wide: bool = False


precision = OpAttr[Precision](
    "precision",
    "how wide the op computes where a job asks for 16-bit floats; read by the precision pass",
    default=Precision(Width.HIGH),
)

precision.register(matmul.MATMUL, Precision(Width.LOW, chooses_output=True))
precision.register(attention.ATTENTION, Precision(Width.LOW))
precision.register(attention.ATTENTION_GRAD, Precision(Width.LOW, kept=(5, 6)))
for _op in (convolution.CONV, convolution.CONV_INPUT_GRAD, convolution.CONV_WEIGHT_GRAD):
    precision.register(_op, Precision(Width.LOW))

FOLLOWING = (
    *(shape.RESHAPE, shape.TRANSPOSE, shape.BROADCAST_TO, shape.STOP_GRADIENT, shape.COPY),
    *(slicing.SLICE, slicing.PAD, slicing.CONCAT),
    *(
        arithmetic.ADD,
        arithmetic.SUB,
        arithmetic.MUL,
        arithmetic.DIV,
        arithmetic.MAXIMUM,
        arithmetic.MINIMUM,
    ),
    arithmetic.WHERE,
    *(arithmetic.NEG, arithmetic.ABS),
    *(activation.TANH, activation.SIGMOID, activation.RELU, activation.GELU, activation.SILU),
    *(activation.GELU_EXACT, activation.LEAKY_RELU, activation.HARDTANH, activation.HARDSWISH),
    *(grad_op(activation.GELU_EXACT), grad_op(activation.HARDTANH)),
    *(grad_op(activation.SIGMOID), grad_op(activation.RELU)),
    *(grad_op(activation.GELU), grad_op(activation.SILU)),
    *(convolution.MAX_POOL, convolution.MAX_POOL_GRAD, convolution.MAX_POOL_PICK),
    DROPOUT,
    COPY_TO,
    TO_SBP,
)
"""The ops that take what comes. Comparisons do not: low or not, the answer is the same."""

for _op in FOLLOWING:
    is_relu_gradient = _op is grad_op(activation.RELU)
    precision.register(_op, Precision(Width.FOLLOW, rounds_wide=is_relu_gradient))
precision.register(normalisation.BATCH_NORM, Precision(Width.HIGH, rounds_wide=True))
precision.register(arithmetic.SQUARE, Precision(Width.FOLLOW, needs_range=True))
for _op in (loss.CROSS_ENTROPY_ROWS, loss.WEIGHTED_CROSS_ENTROPY_ROWS):
    precision.register(_op, Precision(Width.HIGH, reads_logits=True))


_UNKNOWN = ValueId(-1)


def narrow_products(
    graph: Graph, low: DType = DType.BFLOAT16, rounded_bytes: float = math.inf
) -> Graph:
    """Return the graph with its products in a type of 16 bits. O(nodes).

    Logits and normalised images of more than `rounded_bytes`, as float32, are of that type, too.
    """
    widths = tuple([_width_of(graph, node, low) for node in graph.nodes])
    if not any([width.width is Width.LOW for width in widths]):
        return graph
    is_wide = [type_.size_bytes > rounded_bytes for type_ in graph.types]
    is_made_low = _made_as_low(graph, widths, low, is_wide)
    is_low = _read_as_low(graph, widths, is_made_low, is_wide)
    return prune(_PrecisionCopy(graph, widths, is_low, low).run())


def _width_of(graph: Graph, node: Node, low: DType) -> Precision:
    """Return what the column says of a node; one with floats of another width is left alone."""
    fact = precision.get(node.op)
    if fact.width is Width.HIGH or node.attrs.get(KEEPS_PRECISION):
        is_rounded = fact.rounds_wide and fact.width is Width.HIGH
        return Precision(Width.HIGH, reads_logits=fact.reads_logits, rounds_wide=is_rounded)
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


def _made_as_low(
    graph: Graph, widths: tuple[Precision, ...], low: DType, is_wide: list[bool]
) -> list[bool]:
    """Return, per value, whether it would be low if somebody reads it so."""
    is_low = [False] * len(graph.types)
    fits: dict[ValueId, bool] = {}
    for node, fact in zip(graph.nodes, widths, strict=True):
        if node.op is CONSTANT and graph.types[node.outputs[0]].dtype is DType.FLOAT32:
            array = constant_array(node)
            rounded = decoded(encoded(array, low), low).reshape(array.shape)
            fits[node.outputs[0]] = bool(np.array_equal(array, rounded, equal_nan=True))
        elif fact.width is Width.LOW:
            for value, type_ in zip(node.outputs, _low_types(graph, node, fact, low), strict=True):
                is_low[value] = type_.dtype is low
        elif fact.width is Width.HIGH and fact.rounds_wide:
            is_low[node.outputs[0]] = is_low[node.inputs[0]] and is_wide[node.outputs[0]]
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


def _read_as_low(
    graph: Graph, widths: tuple[Precision, ...], is_low: list[bool], is_wide: list[bool]
) -> list[bool]:
    """Return `is_low` without the values that no node reads as low, where there is a choice."""
    is_wanted = [False] * len(graph.types)
    for node, fact in zip(reversed(graph.nodes), reversed(widths), strict=True):
        if fact.reads_logits and is_wide[node.inputs[0]]:
            is_wanted[node.inputs[0]] = True
        if fact.width is Width.LOW:
            if fact.chooses_output and not is_wanted[node.outputs[0]]:
                is_low[node.outputs[0]] = False
            for value in _low_inputs(graph, node, fact):
                is_wanted[value] = True
        elif fact.width is Width.FOLLOW and is_low[node.outputs[0]]:
            stays = any([is_wanted[v] for v in node.outputs])
            stays |= fact.rounds_wide and is_wide[node.outputs[0]]
            for value in node.outputs:
                is_low[value] = stays
            for value in _float_inputs(graph, node) if stays else ():
                is_wanted[value] = True
        elif fact.width is Width.HIGH and fact.rounds_wide and not is_wanted[node.outputs[0]]:
            is_low[node.outputs[0]] = False
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
            with self.b.like_node(node):
                self._copy(node, fact)
        for value in self.graph.roots():
            node = self.graph.nodes[self.producers[value]]
            with self.b.like_node(node):
                self._as(value, DType.FLOAT32)
        return self.b.freeze_as(self.graph, self.wide)

    def _copy(self, node: Node, fact: Precision) -> None:
        """Copy a node on inputs of the types it wants."""
        is_low = self.is_low[node.outputs[0]]
        if fact.width is Width.HIGH or (fact.width is Width.FOLLOW and not is_low):
            inputs = tuple([self._as(v, DType.FLOAT32) for v in node.inputs])
            outputs = self.b.copy(node, inputs, [self.graph.types[v] for v in node.outputs])
            if is_low:  # all readers get the rounded form, so that the other one is not stored
                outputs = (cast_to(self.b, outputs[0], self.low_type),)
        else:
            exact, attrs = fact.kept, node.attrs
            inputs = tuple(
                [
                    self._as(v, DType.FLOAT32 if i in exact else self.low_type)
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
        same, other = (self.low, self.wide) if dtype is self.low_type else (self.wide, self.low)
        passed: list[Node] = []
        while same[value] == _UNKNOWN:
            node = self.graph.nodes[self.producers[value]]
            if dtype is DType.FLOAT32 or not self._is_passed(node):
                with self.b.on(node.device):  # all readers share it, on whatever devices
                    same[value] = self._converted(node, other[value], dtype)
                break
            passed.append(node)
            value = node.inputs[0]
        result = same[value]
        for node in reversed(passed):
            with self.b.on(node.device):
                result = self.b.emit_one(node.op, result, **node.attrs)
            same[node.outputs[0]] = result
        return result

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
        return self.b.emit_one(CONSTANT, **{**node.attrs, "dtype": dtype.value, "data": data})


# Let the update of a parameter write the rounded form that products read, too.
#
#     y = matmul(x, cast(w)); adamw_update(w, dw, m, v, ...)
#       ->  y = matmul(x, r);  joined_updates(w, m, v, r, dw, ...)
#
# where r is a variable of its own, with the bits of cast(w): the update has the new numbers at
# hand, and a cast would read them all again in the next step. It is made of its parameter wherever
# that is given a value (`actors.loop.bound`), so nothing saves it, and nobody sees it. So a
# parameter that no step changes, as of a job that does not train, is rounded once and for all.
#
# Updates write it only on devices that join them, and nothing is kept where a budget is to be met:
# the rounded form lives as long as the parameter, where a cast may be made twice instead.
#
# Guarantees: all values have the bits that they had; every r is written with its parameter.


def round_constants(graph: Graph) -> Graph:
    """Return the graph with the rounded forms of what no step changes as variables. O(nodes)."""
    written, kept = {write.variable for write in graph.writes}, list(graph.writes)
    nodes, readers = list(graph.nodes), consumers(graph)
    for variable, maker in [(n.outputs[0], n) for n in graph.nodes if n.op is VARIABLE]:
        casts = [i for i in readers[variable] if _is_rounding(graph, graph.nodes[i])]
        devices = [graph.nodes[i].device for i in casts]
        is_of_model = maker.attrs.str_("role") in OF_MODEL
        is_single = graph.types[variable].dtype is DType.FLOAT32
        if variable not in written and is_of_model and is_single and devices == [maker.device]:
            (value,) = graph.nodes[casts[0]].outputs
            nodes[casts[0]] = _variable(maker, value, graph.types[value])
            # Nobody may read it any more; it is what the rounded form is made of.
            kept.append(Write(variable, variable))
    return replace(graph, nodes=tuple(nodes), writes=tuple(kept))


def round_in_updates(graph: Graph, hardware: Hardware) -> Graph:
    """Return the graph with casts of parameters written by their updates. O(nodes)."""
    if all([target.max_merged_updates(1) <= 1 for target in hardware.targets]):
        return graph
    nodes, types, writes = list(graph.nodes), list(graph.types), list(graph.writes)
    readers, makers = consumers(graph), graph.producers()
    for index, node in enumerate(graph.nodes):
        alone = mergeable_update(graph, node)
        if alone is None or not _is_taken(graph, node, alone, hardware):
            continue
        variable = alone.operands[0]
        casts = [i for i in readers[variable] if _is_rounding(graph, graph.nodes[i])]
        maker = graph.nodes[makers[variable]]
        if maker.op is not VARIABLE or [graph.nodes[i].device for i in casts] != [node.device]:
            continue
        (value,) = graph.nodes[casts[0]].outputs
        after = new_value(types, graph.types[value])
        nodes[casts[0]] = _variable(maker, value, graph.types[value])
        update = replace(
            alone,
            program=with_rounded(alone.program),
            over=(*alone.over, len(alone.operands)),
            operands=(*alone.operands, value),
        )
        nodes[index] = merge_nodes(graph, node, [update], (*node.outputs, after))
        writes.append(Write(value, after))
    return replace(graph, nodes=tuple(nodes), types=tuple(types), writes=tuple(writes))


def _is_taken(graph: Graph, node: Node, alone: MergeableUpdate, hardware: Hardware) -> bool:
    """Whether an update writes over a float32 variable first, on a device that joins it."""
    is_single = graph.types[alone.operands[0]].dtype is DType.FLOAT32
    most = hardware.targets[node.device].max_merged_updates(len(alone.full) + 1)
    return alone.over[0] == 0 and is_single and most > 1


def _is_rounding(graph: Graph, node: Node) -> bool:
    """Whether a node is a cast to bfloat16 that nobody but other nodes reads."""
    (value,) = node.outputs[:1]
    is_cast = node.op is CAST and graph.types[value].dtype is DType.BFLOAT16
    return is_cast and value not in graph.roots()


def _variable(maker: Node, value: ValueId, type_: TensorType) -> Node:
    """Return the rounded form of a variable, as a variable."""
    name = maker.attrs.str_("name")
    attrs: dict[str, AttrValue] = {
        "name": f"{type_.dtype.value}/{name}",
        "dtype": type_.dtype.value,
        "shape": type_.shape,
        "role": ROUNDED,
        "init": (("kind", ROUNDED), ("of", name)),
    }
    return replace(maker, outputs=(value,), attrs=Attrs(attrs))


@lru_cache(maxsize=256)  # layers repeat, and share it
def with_rounded(program: FusedProgram) -> FusedProgram:
    """Return a program with one operand and one output more: output 0 in bfloat16, to lie there."""
    count = len(program.inputs)

    def moved(value: int) -> int:
        return value + (value >= count)

    low = DType.BFLOAT16
    steps = [replace(i, operands=tuple(map(moved, i.operands))) for i in program.instructions]
    cast = Instruction("cast", (moved(program.outputs[0]),), low, Kind.FULL)
    outputs = (*map(moved, program.outputs), count + 1 + len(steps))
    return FusedProgram(
        (*program.inputs, ProgramInput(low, Kind.FULL)), (*steps, cast), tuple(outputs)
    )
