"""Where the tensors and ops of a job lie: `af.Mesh` and `sbp=`, `af.device`, `af.stage`.

    @af.job(mesh=af.Mesh(data=2, model=2), optimizer=af.optim.AdamW(1e-3))

    nn.Linear(64, 256, sbp={"model": af.split(0)})
    x.to_sbp(model=af.split(1))

A layout gives axes of the mesh a word each: `af.split(axis)`, a part of an axis of the tensor on
each rank; `af.broadcast`, all of it on each; `af.partial`, terms that are summed. "S(0)", "B" and
"P" are the same as texts. Of axes that it does not name the compiler decides. A job without a mesh,
or on a mesh of one rank, takes no notice of layouts: its graph is the one without them.

The regions `af.device` and `af.stage` put the ops that are called in them on a device of the job,
or on a stage of a pipeline. `compiler.sbp.stages` puts all other ops on stages.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from actorflow.tensor.tracer import Trace, current_trace, find_source
from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError
from compiler.contract.placement import Device, DeviceKind
from compiler.contract.placement import Mesh as MeshOfRanks
from compiler.contract.sbp import (
    BROADCAST,
    PARTIAL,
    Broadcast,
    Layout,
    Partial,
    Sbp,
    Split,
    parse_sbp,
)
from compiler.contract.types import TensorType, ValueId
from compiler.graph.graph import UNPLACED, GraphBuilder, Node, SourceLocation
from compiler.graph.registry import is_source, view
from compiler.ops.families.updates import EMA_UPDATE
from compiler.ops.primitives.sources import CONSTANT, INPUT, VARIABLE
from compiler.ops.primitives.transfer import COPY_TO, STAGE, TO_SBP

broadcast: Broadcast = BROADCAST
"""Every rank has all of the tensor, the same bits."""

partial: Partial = PARTIAL
"""The tensor is the sum of what the ranks have."""

MOST_RANKS = 1_024
"""Of one mesh: all of them are listed for every group that meets."""

Words = Mapping[str, Sbp | str]
"""What a user gives for one tensor."""

LayerWords = Words | Mapping[str, Words]
"""What a user gives for a layer: words of its weight, or such for parameters by name."""

_REST = -1
_WORDS = 'af.split(axis), af.broadcast, af.partial, or a text such as "S(0)", "B" or "P"'


def Mesh(*unnamed: object, **axes: int) -> MeshOfRanks:  # noqa: N802  # what it makes
    """Return a mesh of ranks: axes by name, outermost first, and how many ranks each has.

    Along the axis "data" ranks have different rows of a batch, and along "stage" different stages
    of a pipeline; other names are the user's. `af.Mesh(data=2, model=2)` is of four ranks: 0 and 1
    have the first half of the rows. One axis may be -1: it has the ranks that are left of those
    launched (WORLD_SIZE; one without a launch). Raises CompileError with the user's line.
    """
    where = find_source()
    if unnamed or not axes:
        raise CompileError(
            f"{where}: the axes of af.Mesh have names, such as af.Mesh(data=2, model=2); got"
            f" {', '.join(map(repr, unnamed)) or 'none'}"
        )
    for name, extent in axes.items():
        if not name.isidentifier():
            raise CompileError(
                f"{where}: an axis of af.Mesh has a name such as data, model or my_axis, got"
                f" {name!r}"
            )
        is_number = isinstance(extent, int) and not isinstance(extent, bool)
        if not is_number or not (extent >= 1 or extent == _REST):
            raise CompileError(
                f"{where}: axis {name!r} of af.Mesh must have an integer of 1 or more ranks, or -1"
                f" for those that are left, got {extent!r}"
            )
    axes = _without_rest(axes, where)
    if math.prod(axes.values()) > MOST_RANKS:
        raise CompileError(
            f"{where}: af.Mesh of {math.prod(axes.values()):,} ranks; at most {MOST_RANKS:,} are"
            " possible"
        )
    return MeshOfRanks(tuple(axes), tuple(axes.values()))


def _without_rest(axes: dict[str, int], where: SourceLocation) -> dict[str, int]:
    """Return the extents of axes, with the ranks that are left in place of -1."""
    rest = [name for name, extent in axes.items() if extent == _REST]
    if not rest:
        return axes
    came = ", ".join([f"{name}={extent}" for name, extent in axes.items()])
    if len(rest) > 1:
        raise CompileError(
            f"{where}: one axis of af.Mesh may have the ranks that are left (-1), got {came}"
        )
    # The launcher gives it to all ranks alike; that it is right, a job checks when it is called.
    text = os.environ.get("WORLD_SIZE", "1")
    others = math.prod([extent for extent in axes.values() if extent != _REST])
    if not (text.isascii() and text.isdigit() and int(text) > 0 and int(text) % others == 0):
        raise CompileError(
            f"{where}: af.Mesh({came}) needs a multiple of {others} ranks, and {text} run the"
            f" script (WORLD_SIZE); launch such a number, as by 'actorflow launch -n {others}'"
        )
    return {**axes, rest[0]: int(text) // others}


def layout_of(given: object, what: str) -> Layout:
    """Return the layout that a user gives. Raises CompileError with his line for what is none.

    Whether a mesh has such axes, and a tensor so many rows, is known when a job is traced.
    """
    where = find_source()
    if not isinstance(given, Mapping):
        raise CompileError(
            f'{where}: {what} must be a dict of SBPs by mesh axis, such as {{"model":'
            f" af.split(0)}}, got {given!r}"
        )
    return tuple([(_name(name, what, where), _word(w, what, where)) for name, w in given.items()])


def layouts_of(given: LayerWords, ranks: Mapping[str, int], layer: str) -> dict[str, Words]:
    """Return words for parameters of a layer, by name; `ranks` are their numbers of axes.

    Words alone are those of the first parameter, the weight. Others have its first axes alone, as a
    bias has: they are split where these are, and whole where another axis is. Raises CompileError
    with the user's line.
    """
    where, what = find_source(), f"sbp of {layer}"
    if not isinstance(given, Mapping) or not any([isinstance(w, Mapping) for w in given.values()]):
        layout, of_weight = layout_of(given, what), next(iter(ranks.values()))
        return {
            name: {axis: _beside_weight(word, rank, of_weight) for axis, word in layout}
            for name, rank in ranks.items()
        }
    for name, words in given.items():
        if not isinstance(words, Mapping):
            raise CompileError(
                f"{where}: {what} has keys that are parameters and keys that are mesh axes; give"
                f" one or the other, got {name!r}: {words!r}"
            )
        if name not in ranks:
            raise CompileError(
                f"{where}: {what} names parameter {name!r}, and the layer has"
                f" {', '.join(map(repr, ranks))}"
            )
    return cast("dict[str, Words]", dict(given))


def _beside_weight(word: Sbp, rank: int, of_weight: int) -> Sbp:
    if not isinstance(word, Split) or rank == of_weight:
        return word
    axis = word.axis + of_weight if word.axis < 0 else word.axis
    return Split(axis) if axis < rank else BROADCAST


def _name(name: object, what: str, where: SourceLocation) -> str:
    if not isinstance(name, str) or isinstance(name, Sbp):
        raise CompileError(
            f"{where}: {what} names axes of the mesh by texts, such as 'model', got {name!r}"
        )
    return name


def _word(given: object, what: str, where: SourceLocation) -> Sbp:
    if isinstance(given, Sbp):
        return given
    if isinstance(given, str):
        try:
            return parse_sbp(given)
        except ValueError as error:
            raise CompileError(f"{where}: {what}: {error}") from None
    raise CompileError(f"{where}: {what} takes {_WORDS}; got {given!r}")


def constraint(
    layout: Layout, type_: TensorType, mesh: MeshOfRanks, what: str, where: SourceLocation
) -> Layout:
    """Return what a node of the graph has of a layout: its axes are counted from the front.

    Axes of one rank are left out: there is nothing to choose. Raises CompileError for an axis that
    the mesh has not, for one beyond the tensor's rank, and where a rank would have no row.
    """
    for name, _ in layout:
        if name not in mesh.names:
            raise CompileError(
                f"{where}: {what} names axis {name!r}, which the mesh of the job does not have;"
                f" its axes are {', '.join(map(repr, mesh.names))} ({mesh}). To keep the tensor"
                f" whole, declare the axis with one rank: af.Mesh(..., {name}=1)"
            )
        if name == STAGE:
            raise CompileError(
                f"{where}: {what} names axis {STAGE!r}, whose ranks run different ops, so no"
                " tensor is split over them; assign ops to stages with af.stage"
            )
    words, axes = dict(layout), list[tuple[str, Sbp]]()
    rows = list(type_.shape)
    for name, parts in zip(mesh.names, mesh.shape, strict=True):
        word = words.get(name)
        if isinstance(word, Split):
            word = _split_of(word, type_, what, where)
            if rows[word.axis] < parts:
                raise CompileError(
                    f"{where}: {what} splits axis {word.axis} of {type_} over {parts} ranks along"
                    f" {name!r}, and its extent there is {rows[word.axis]}: every rank needs a"
                    " row. Make the axis longer, or leave it whole with af.broadcast"
                )
            # A second axis of the mesh may split the same axis: it cuts the parts of the first.
            rows[word.axis] //= parts
        # An axis of one rank constrains nothing, and would make other plans of equal graphs.
        if word is not None and parts > 1:
            axes.append((name, word))
    return tuple(axes)


def laid_out(trace: Trace, value: ValueId, given: object, axes: Words) -> ValueId:
    """Return a value of a trace in the layout that a user gives, as a mapping or by keywords.

    It is the value itself where the job has no ranks to lay it out on. An entry of the batch comes
    as the first layout of it says: each rank is given its own part. Raises CompileError.
    """
    where, what = find_source(), "to_sbp"
    if (given is None) == (not axes):
        raise CompileError(
            f"{where}: {what} takes SBPs by mesh axis, such as x.to_sbp(model=af.split(1)), or"
            f' x.to_sbp({{"model": af.split(1)}}); got {"both" if axes else "none"}'
        )
    layout = layout_of(axes if given is None else given, what)
    if trace.mesh is None:
        return value
    sbp = constraint(layout, trace.builder.type_of(value), trace.mesh, what, where)
    maker = trace.builder.producer_of(value)
    can_come = [(axis, word) for axis, word in sbp if not isinstance(word, Partial)]
    if maker.op is INPUT and can_come and "sbp" not in maker.attrs:
        trace.builder.add_outputs(value, Attrs({**maker.attrs, "sbp": tuple(can_come)}), ())
    return trace.emit(TO_SBP, [value], Attrs({"sbp": sbp}))[0] if sbp else value


def _split_of(word: Split, type_: TensorType, what: str, where: SourceLocation) -> Split:
    """Return a split along an axis that is counted from the front."""
    if not -type_.rank <= word.axis < type_.rank:
        axes = [str(axis) for axis in range(type_.rank)]
        mend = " or ".join([", ".join(axes[:-1]), axes[-1]] if axes[1:] else axes)
        raise CompileError(
            f"{where}: {what} splits axis {word.axis}, and {type_} has"
            f" {type_.rank or 'no'} {'axis' if type_.rank == 1 else 'axes'};"
            f" {f'use {mend}' if mend else 'leave it whole with af.broadcast'}"
        )
    return Split(word.axis % type_.rank)


# A region of `af.device` places the ops that are called in it, whatever they read. Outside of every
# region an op runs where its operands lie, as in torch; on the job's first device, if they lie
# nowhere yet. What only stands for numbers lies nowhere until something reads it: batches,
# parameters, constants, and views of them. So a parameter lies where it is first used, with its
# optimizer state. A copy by `to` says where its result lies.
#
# A job of several devices that names none of them, in no region and no `to`, is left UNPLACED:
# the compiler then places it by cost.


class DeviceRegion:
    """A region of a job whose ops run on one device; see `device`. May be entered many times."""

    def __init__(self, name: str) -> None:
        parsed_device(name)
        self._name = name

    def __enter__(self) -> None:
        trace = current_trace()
        if trace is None:
            raise CompileError(
                f"{find_source()}: af.device({self._name!r}) places ops of a job, and none is"
                " traced; use it inside of a function decorated with @af.job"
            )
        trace.regions.append(device_number(trace, self._name))

    def __exit__(self, *raised: object) -> None:
        trace = current_trace()
        if trace is not None:
            trace.regions.pop()


def device(name: str) -> DeviceRegion:
    """Run what a job computes in a region on one of its devices.

        with af.device("sim:1"):
            h = model.upper(h)

    What the ops read from other devices is copied, but for parameters: one lies where it is first
    used, and is read elsewhere through `parameter.to(...)` only. Raises CompileError for a name
    that is none, or none of the job's devices.
    """
    return DeviceRegion(name)


class PrecisionRegion:
    """A region of a job whose products are in float32; see `precision`. May be entered often."""

    def __enter__(self) -> None:
        trace = current_trace()
        if trace is None:
            raise CompileError(
                f"{find_source()}: af.precision is about products of a job, and none is traced; use"
                " it inside of a function decorated with @af.job"
            )
        trace.num_precise += 1

    def __exit__(self, *raised: object) -> None:
        trace = current_trace()
        if trace is not None:
            trace.num_precise -= 1


def precision(name: str) -> PrecisionRegion:
    """Keep the products in a region of a job in float32, forward and backward.

        with af.precision("fp32"):
            scores = q @ k.T

    Of a job with precision="bf16" or "fp16", whose products read 16 bits elsewhere; in any other it
    changes nothing. What the region reads may have been rounded before it. Raises CompileError for
    another name: which 16 bits a job computes in, it says itself.
    """
    if name != "fp32":
        raise CompileError(
            f'{find_source()}: af.precision takes "fp32", got {name!r}; a whole job computes in 16'
            ' bits: @af.job(precision="bf16")'
        )
    return PrecisionRegion()


def is_device_name(text: str) -> bool:
    """Whether a text means a device, perhaps one that there is not, and no element type."""
    return ":" in text or text in [kind.value for kind in DeviceKind]


def parsed_device(text: object) -> Device:
    """Return the device of a text. Raises CompileError, naming the kinds that there are."""
    try:
        return Device.parse(text)
    except ValueError as error:
        raise CompileError(f"{find_source()}: {error}") from None


def device_number(trace: Trace, name: str) -> int:
    """Return the number of a device that the user names in a job.

    Raises CompileError where it is none of the job's.
    """
    named, devices = parsed_device(name), trace.devices
    if named not in devices:
        listed = ", ".join([repr(str(d)) for d in (*devices, named)])
        raise CompileError(
            f"{find_source()}: {str(named)!r} is none of the job's devices, which are"
            f" {', '.join(map(str, devices))}; name all that it uses: @af.job(devices=[{listed}])"
        )
    trace.names_devices = True
    return devices.index(named)


def place_traced(trace: Trace) -> None:
    """Give every node of a finished trace its device. Raises CompileError naming the user's line.

    O(nodes); nothing to do for a job of one device.
    """
    if len(trace.devices) == 1 or not trace.names_devices:
        return
    b = trace.builder
    places = _by_operands(b, trace.devices)
    _by_readers(b.nodes, places)
    made_by = {value: index for index, node in enumerate(b.nodes) for value in node.outputs}
    for rule in b.updates:
        for state in rule.state:
            places[made_by[state]] = places[made_by[rule.variable]]
    for node in b.nodes:
        if node.op is EMA_UPDATE and b.producer_of(node.inputs[1]).op is VARIABLE:
            # An average lies beside its parameter, which would be copied in every step else.
            places[made_by[node.inputs[0]]] = places[made_by[node.inputs[1]]]
    for index, node in enumerate(b.nodes):
        for _, over in node.writes:  # what is assigned is brought to where the buffer lies
            places[index] = places[made_by[node.inputs[over]]]
    b.nodes = [replace(n, device=d) for n, d in zip(b.nodes, places, strict=True)]


def _by_operands(b: GraphBuilder, devices: tuple[Device, ...]) -> list[int]:
    """Return, per node, its device: that of its region, or of what it reads; UNPLACED if open."""
    lies = [UNPLACED] * len(b.types)
    places: list[int] = []
    for node in b.nodes:
        place = UNPLACED if is_source.get(node.op) else node.device
        if node.op is COPY_TO:
            place = node.attrs.int_("to")
        elif node.device == UNPLACED and not is_source.get(node.op):
            place = _of_operands(b, node, lies, devices)
        places.append(place)
        for value in node.outputs:
            lies[value] = place
    return places


def _of_operands(
    b: GraphBuilder, node: Node, lies: Sequence[int], devices: tuple[Device, ...]
) -> int:
    placed = {lies[v]: v for v in reversed(node.inputs) if lies[v] != UNPLACED}
    if len(placed) > 1:
        (here, one), (there, other) = sorted(placed.items())[:2]
        raise CompileError(
            f"{node.source}: {node.op} reads a value on {devices[here]}"
            f" ({b.producer_of(one).source}) and one on {devices[there]}"
            f' ({b.producer_of(other).source}); copy the first with .to("{devices[there]}"), or'
            f' place the op: with af.device("{devices[there]}"):'
        )
    if placed:
        return next(iter(placed))
    is_open = view.has(node.op) or all([b.producer_of(v).op is CONSTANT for v in node.inputs])
    return UNPLACED if is_open else 0


def _by_readers(nodes: Sequence[Node], chosen: list[int]) -> None:
    """Let what lies nowhere yet lie where it is first read, but for copies; else on device 0."""
    reader: dict[ValueId, int] = {}
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        if chosen[index] == UNPLACED:
            chosen[index] = _first(node.outputs, reader)
        if node.op is not COPY_TO:
            for value in node.inputs:
                reader[value] = chosen[index]


def _first(values: Iterable[ValueId], reader: dict[ValueId, int]) -> int:
    return next((reader[v] for v in values if v in reader), 0)


class StageRegion:
    """A region of a job whose ops run on one stage; see `stage`. May be entered many times."""

    def __init__(self, number: int) -> None:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise CompileError(
                f"{find_source()}: a stage is an integer of 0 or more, got {number!r}"
                f" ({type(number).__name__}): they are counted in the order in which a batch goes"
                " through them"
            )
        self._number = number

    def __enter__(self) -> None:
        trace = current_trace()
        if trace is None:
            raise CompileError(
                f"{find_source()}: af.stage({self._number}) divides a job, and no job is being"
                " traced; use it inside of a function decorated with @af.job"
            )
        trace.stages.append(self._number)

    def __exit__(self, *raised: object) -> None:
        trace = current_trace()
        if trace is not None:
            trace.stages.pop()


def stage(number: int) -> StageRegion:
    """Run what a job computes in a region on one stage of a pipeline.

        with af.stage(0):
            h = model.lower(batch.x)
        with af.stage(1):
            h = model.upper(h)

    The mesh's axis "stage" has a rank, or more along other axes, for each stage; without that axis
    one rank runs all of them. What is called outside of every region runs on the last stage that it
    reads something of. Parameters, their gradients and their optimizer's state are on the stage
    that reads them. Raises CompileError for a number that is none.
    """
    return StageRegion(number)
