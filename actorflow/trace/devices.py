"""Where the ops of a job run: `with af.device("sim:1"):`, and `x.to("sim:1")`.

A region places the ops that are called in it, whatever they read. Outside of every region an op
runs where its operands lie, as in torch; on the job's first device, if they lie nowhere yet. What
only stands for numbers lies nowhere until something reads it: batches, parameters, constants, and
views of them. So a parameter lies where it is first used, with its optimizer state. A copy by `to`
says where its result lies.

A job of several devices that names none of them, in no region and no `to`, is left UNPLACED:
the compiler then places it by cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from actorflow.trace.tracer import Trace, current_trace, find_source
from compiler.errors import CompileError
from compiler.graph import UNPLACED, GraphBuilder, Node
from compiler.ops.copies import COPY_TO
from compiler.ops.sources import CONSTANT, VARIABLE
from compiler.ops.update import APPROACH
from compiler.placement import Device, DeviceKind
from compiler.registry import is_source, view
from compiler.types import ValueId


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
    named, own = parsed_device(name), trace.devices
    if named not in own:
        wanted = ", ".join([repr(str(d)) for d in (*own, named)])
        raise CompileError(
            f"{find_source()}: {str(named)!r} is none of the job's devices, which are"
            f" {', '.join(map(str, own))}; name all that it uses: @af.job(devices=[{wanted}])"
        )
    trace.names_devices = True
    return own.index(named)


def place_traced(trace: Trace) -> None:
    """Give every node of a finished trace its device. Raises CompileError naming the user's line.

    O(nodes); nothing to do for a job of one device.
    """
    if len(trace.devices) == 1 or not trace.names_devices:
        return
    b = trace.builder
    chosen = _by_operands(b, trace.devices)
    _by_readers(b.nodes, chosen)
    made_by = {value: index for index, node in enumerate(b.nodes) for value in node.outputs}
    for rule in b.updates:
        for state in rule.state:
            chosen[made_by[state]] = chosen[made_by[rule.variable]]
    for node in b.nodes:
        if node.op is APPROACH and b.producer_of(node.inputs[1]).op is VARIABLE:
            # An average lies beside its parameter, which would be copied in every step else.
            chosen[made_by[node.inputs[0]]] = chosen[made_by[node.inputs[1]]]
    for index, node in enumerate(b.nodes):
        for _, over in node.writes:  # what is assigned is brought to where the buffer lies
            chosen[index] = chosen[made_by[node.inputs[over]]]
    b.nodes = [replace(n, device=d) for n, d in zip(b.nodes, chosen, strict=True)]


def _by_operands(b: GraphBuilder, devices: tuple[Device, ...]) -> list[int]:
    """Return, per node, its device: that of its region, or of what it reads; UNPLACED if open."""
    lies = [UNPLACED] * len(b.types)
    chosen: list[int] = []
    for node in b.nodes:
        place = UNPLACED if is_source.get(node.op) else node.device
        if node.op is COPY_TO:
            place = node.attrs.int_("to")
        elif node.device == UNPLACED and not is_source.get(node.op):
            place = _of_operands(b, node, lies, devices)
        chosen.append(place)
        for value in node.outputs:
            lies[value] = place
    return chosen


def _of_operands(
    b: GraphBuilder, node: Node, lies: Sequence[int], devices: tuple[Device, ...]
) -> int:
    placed = {lies[v]: v for v in reversed(node.inputs) if lies[v] != UNPLACED}
    if len(placed) > 1:
        (here, one), (there, other) = sorted(placed.items())[:2]
        raise CompileError(
            f"{node.source}: {node.op} reads a value on {devices[here]}"
            f" ({b.producer_of(one).source}) and one on {devices[there]}"
            f" ({b.producer_of(other).source}); bring one to the other with"
            f' .to("{devices[there]}"), or say where it runs: with af.device("{devices[there]}"):'
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
