"""From values to buffers: launches, their kernels, in-place sharing, and when each launch runs.

A *draft* is a launch with its kernel chosen by the target. A *buffer* is the bytes of one or more
roots: an output takes over the buffer of an input that dies in the same launch, when the kernel
allows that pair and both are dense and equal in size. A root into which several launches write
their parts lives from the first of them on. Live intervals are in launches, half-open.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from compiler.contract.attrs import NO_ATTRS
from compiler.contract.errors import CompileError
from compiler.contract.types import TensorType, ValueId
from compiler.graph.graph import Graph, Node
from compiler.graph.registry import is_comm
from compiler.graph.target import CallOperand, Hardware, KernelCall, KernelInfo
from compiler.ops.primitives.shape import COPY
from compiler.ops.primitives.transfer import (
    ALL_REDUCE,
    ALL_TO_ALL,
    is_copy,
    value_device,
    value_devices,
)
from compiler.storage.order import needed_per_step
from compiler.storage.storage import Storage, assign_storage, call_of, dense_layout, is_dense


@dataclass(frozen=True, slots=True)
class LaunchDraft:
    """A launch to be: its node and the kernel the target chose."""

    node: Node
    info: KernelInfo


@dataclass(frozen=True, slots=True)
class LiveBuffer:
    """Bytes of the chain: the first root that lives here, and the live interval in launches."""

    root: ValueId
    size_bytes: int
    interval: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Buffers:
    """All buffers of a chain; `of_root` maps every root made by a launch to its buffer.

    `left_to` has the root outside, in a register between chains, whose bytes a buffer has.
    """

    buffers: tuple[LiveBuffer, ...]
    of_root: dict[ValueId, int]
    left_to: dict[int, ValueId]


def draft_launches(graph: Graph, storage: Storage, hardware: Hardware) -> tuple[LaunchDraft, ...]:
    """Choose a kernel for every launch. Raises CompileError when a device has none for an op."""
    drafts: list[LaunchDraft] = []
    # Layers repeat: calls are told apart by the numbers of their operands, not by their contents.
    numbers = _operand_numbers(graph, storage)
    answers: dict[tuple[object, ...], KernelInfo] = {}
    for index, node in enumerate(graph.nodes):
        if not storage.is_launch[index]:
            continue
        inputs = tuple([numbers[v] for v in node.inputs])
        outputs = tuple([numbers[v] for v in node.outputs])
        key = (node.op, node.attrs, inputs, outputs, node.device)
        if key not in answers:
            try:
                answers[key] = _kernel_of(graph, storage, node, hardware)
            except LookupError as error:
                raise CompileError(f"{node.source}: {error.args[0]}") from None
        drafts.append(LaunchDraft(node, answers[key]))
    return tuple(drafts)


def _operand_numbers(graph: Graph, storage: Storage) -> list[int]:
    """Return a number per value; those with one type, layout and place have the same."""
    numbers: dict[tuple[object, ...], int] = {}
    return [
        numbers.setdefault(
            (type_.dtype, type_.shape, layout.offset_bytes, layout.strides_bytes, place),
            len(numbers),
        )
        for type_, layout, place in zip(
            graph.types, storage.layout, value_devices(graph), strict=True
        )
    ]


def _kernel_of(graph: Graph, storage: Storage, node: Node, hardware: Hardware) -> KernelInfo:
    """Ask the target of its device for a node's kernel. Raises LookupError when it has none."""
    target = hardware.targets[node.device]
    if is_comm.get(node.op):
        time_ns = _meeting_ns(graph, node, hardware)
        # What ranks exchange cannot be overwritten while others still read it.
        in_place = ((0, 0),) if node.op is ALL_REDUCE else ()
        return KernelInfo(node.op.name, in_place=in_place, duration_ns=time_ns)
    if is_copy(node):
        x = node.inputs[0]
        return copy_info(hardware, value_device(graph, x), node.attrs.int_("to"), graph.types[x])
    return target.query(call_of(node, graph.types, storage.layout.__getitem__))


def _meeting_ns(graph: Graph, node: Node, hardware: Hardware) -> float:
    """Return what a collective, or a message, is stated to take: on all ranks the same."""
    num_ranks = node.attrs.int_("num_ranks")
    size = max([graph.types[v].size_bytes for v in (*node.inputs, *node.outputs)])
    size *= num_ranks if node.op is ALL_TO_ALL else 1
    return hardware.ranks.link(node.attrs.str_("group")).time_ns(node.op.name, size, num_ranks)


def copy_info(hardware: Hardware, start: int, end: int, type_: TensorType) -> KernelInfo:
    """Return what a copy from place to place needs: the kernel, and the link's time.

    Without a link, as on the host itself, it takes what any copy takes. Raises LookupError when the
    device whose stream copies has no kernel for it.
    """
    device, _ = hardware.copy_stream(start, end)
    operand = CallOperand(type_, dense_layout(type_))
    info = hardware.targets[device].query(KernelCall(COPY.name, NO_ATTRS, (operand,), (operand,)))
    link = hardware.link(end, start)
    if link is None:
        return replace(info, in_place=())
    return replace(info, in_place=(), duration_ns=link.in_ns(type_.size_bytes))


def assign_buffers(
    graph: Graph,
    storage: Storage,
    drafts: tuple[LaunchDraft, ...],
    fixed: Container[ValueId],
    handed: Sequence[ValueId] = (),
    leaving: Container[ValueId] = (),
) -> Buffers:
    """Give every root made by one of these launches a buffer. O(launches).

    `fixed` are roots with bytes of their own elsewhere (of sources, or in registers between
    actors): they get no buffer and are never shared. But for those that are `handed` to these
    launches and die here: their buffers are the first ones, and another root may take them over.
    And what is `leaving` may take over a buffer, which then has its bytes from the beginning.
    """
    last_use = last_uses(storage, drafts)
    of_root = {root: index for index, root in enumerate(handed)}
    roots = list(handed)
    starts = [0] * len(roots)
    ends = [last_use[root] + 1 for root in handed]
    left_to: dict[int, ValueId] = {}
    for index, draft in enumerate(drafts):
        donors = _donors(graph, storage, draft, index, last_use, of_root)
        updated = [output for output, _ in draft.node.writes]
        for position, value in enumerate(draft.node.outputs):
            root, buffer = storage.root[value], donors.get(position)
            if root in leaving and buffer is not None and buffer >= len(handed):
                left_to.setdefault(buffer, root)
            # An update writes in place of its variable, which has its home.
            if root in fixed or root in of_root or position in updated:
                continue
            if buffer is None:
                buffer = len(roots)
                roots.append(root)
                starts.append(index)
                ends.append(index + 1)
            of_root[root] = buffer
            # Ends are exclusive: the launch that reads last still holds the bytes.
            ends[buffer] = max(ends[buffer], last_use.get(root, index) + 1)
    buffers = tuple(
        LiveBuffer(root, graph.types[root].size_bytes, (start, end))
        for root, start, end in zip(roots, starts, ends, strict=True)
    )
    return Buffers(buffers, of_root, left_to)


def last_uses(storage: Storage, drafts: tuple[LaunchDraft, ...]) -> dict[ValueId, int]:
    """Return the last launch that reads each root, or a view on it."""
    last: dict[ValueId, int] = {}
    for index, draft in enumerate(drafts):
        for value in draft.node.inputs:
            last[storage.root[value]] = index
    return last


def _donors(
    graph: Graph,
    storage: Storage,
    draft: LaunchDraft,
    index: int,
    last_use: dict[ValueId, int],
    of_root: dict[ValueId, int],
) -> dict[int, int]:
    """Return, per output position, the buffer of an input it may overwrite."""
    donors: dict[int, int] = {}
    node = draft.node
    for output, position in draft.info.in_place:
        value = node.inputs[position]
        root = storage.root[value]
        is_part = storage.root[node.outputs[output]] != node.outputs[output]
        # A part of a joined root has its place already, and an input that is read later stays.
        if is_part or output in donors or root not in of_root or last_use[root] != index:
            continue
        if of_root[root] not in donors.values() and may_share_bytes(
            graph, storage, draft, output, position
        ):
            donors[output] = of_root[root]
    return donors


def may_share_bytes(
    graph: Graph, storage: Storage, draft: LaunchDraft, output: int, given: int
) -> bool:
    """Whether an output may lie in the bytes of an input that dies in this launch.

    The kernel allows the pair; both must cover the whole root, row by row. So must every other
    input that shows it, and the kernel allows those too: it may read them at another time.
    """
    node = draft.node
    if node.writes:
        return False
    root = storage.root[node.inputs[given]]
    places = [place for place, value in enumerate(node.inputs) if storage.root[value] == root]
    same_root = [node.inputs[place] for place in places]
    size = graph.types[node.outputs[output]].size_bytes
    return (
        size == graph.types[root].size_bytes
        and all([is_dense(graph.types[v], storage.layout[v]) for v in same_root])
        and all([graph.types[v].size_bytes == size for v in same_root])
        and all([(output, place) in draft.info.in_place for place in places])
    )


# Passes that look ahead in time ask when each launch would run if one followed the other.
# Collectives and copies run beside the others and take no time here. What runs once per batch and
# what runs once per step have a clock each.


@dataclass(frozen=True, slots=True)
class LaunchTimes:
    """The computing launches of one rate in order: their nodes, when they end, what they make.

    `begin_ns` has the times of all launches of the rate, by node.
    """

    nodes: tuple[int, ...]
    ends_ns: tuple[float, ...]
    made: tuple[ValueId, ...]
    begin_ns: dict[int, float]

    def last_before(self, time_ns: float) -> ValueId | None:
        """Return a value of the last launch that has ended by then, None where there is none."""
        count = bisect_right(self.ends_ns, time_ns)
        return self.made[count - 1] if count else None

    def duration_ns(self, launch: int) -> float:
        """Return the duration of a launch, by its place in the order."""
        return self.ends_ns[launch] - self.begin_ns[self.nodes[launch]]


def launch_times(graph: Graph, hardware: Hardware, *, is_per_step: bool) -> LaunchTimes:
    """Return the times of an ordered graph. Raises CompileError when a kernel is missing."""
    storage = assign_storage(graph)
    per_step = needed_per_step(graph)
    begin: dict[int, float] = {}
    computing: list[int] = []
    ends: list[float] = []
    now = 0.0
    for index, draft in zip(
        storage.launches, draft_launches(graph, storage, hardware), strict=True
    ):
        if per_step[index] != is_per_step:
            continue
        begin[index] = now
        if not is_comm.get(draft.node.op) and not is_copy(draft.node):
            now += draft.info.duration_ns
            computing.append(index)
            ends.append(now)
    values = tuple([graph.nodes[index].outputs[0] for index in computing])
    return LaunchTimes(tuple(computing), tuple(ends), values, begin)
