"""When each launch would run if one followed the other: what passes that look ahead in time ask.

Collectives and copies run beside the others and take no time here. What runs once per batch and
what runs once per step have a clock each.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from compiler.graph import Graph
from compiler.lowering.buffers import draft_launches
from compiler.lowering.storage import assign_storage
from compiler.ops.copies import is_copy
from compiler.rates import needed_per_step
from compiler.registry import is_comm
from compiler.target import Hardware
from compiler.types import ValueId


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
    made = tuple([graph.nodes[index].outputs[0] for index in computing])
    return LaunchTimes(tuple(computing), tuple(ends), made, begin)
