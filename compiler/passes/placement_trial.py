"""One schedule of a graph on a simulated machine of several devices; `compiler.passes.place`."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from compiler.graph import Graph
from compiler.ops.sources import CONSTANT, INPUT
from compiler.target import Hardware
from compiler.types import ValueId

_WORTH = 1.1
"""How much sooner a step must end on several devices than on one, by durations before fusion."""

_FLOATING = (CONSTANT, INPUT)
"""What lies wherever it is read: a constant is made there, a batch comes from the host."""


@dataclass(frozen=True, slots=True)
class PlacementWork:
    """What trials have in common; views and sources take no time and are part of no schedule.

    `maker` has, per value, the node whose bytes it shows; `group`, per node, the first node of
    those that are placed with it. Of groups: `able` are the devices with kernels for all of it,
    `pinned` the device of those that are placed, `counters` those of the engine's own, `lasting`
    the bytes of their variables. Of launches: `reads` are the values, `times` the duration on each
    device, None where that has no kernel, `rank` the time from the begin to the end of all.
    """

    graph: Graph
    hardware: Hardware
    maker: tuple[int, ...]
    group: tuple[int, ...]
    able: dict[int, tuple[int, ...]]
    pinned: dict[int, int]
    counters: tuple[int, ...]
    lasting: dict[int, int]
    reads: dict[int, tuple[ValueId, ...]]
    times: dict[int, tuple[float | None, ...]]
    rank: dict[int, float]

    def before(self, launch: int) -> list[int]:
        """Return the launches that make what one reads."""
        makers = [self.maker[value] for value in self.reads[launch]]
        return list(dict.fromkeys([maker for maker in makers if maker in self.reads]))

    def move_ns(self, start: int, end: int, size_bytes: int) -> float:
        """Return what it takes until a device has the bytes of another one."""
        link = self.hardware.link(end, start)
        time = self.hardware.message_ns(start, end)
        return time if link is None else time + link.in_ns(size_bytes)

    def made_bytes(self, launch: int) -> int:
        """Return the bytes of what a launch makes, and not over a variable."""
        node = self.graph.nodes[launch]
        over = [output for output, _ in node.writes]
        made = [v for position, v in enumerate(node.outputs) if position not in over]
        return sum([self.graph.types[v].size_bytes for v in made])


class PlacementTrial:
    """One schedule on a simulated machine, which fills a share of each device's memory.

    With `only` all goes to one device, as far as that has kernels. `chosen` has the device of each
    group; `excess_bytes` what the fullest device has too much.
    """

    def __init__(self, work: PlacementWork, share: float, only: int | None = None) -> None:
        self._work = work
        self._only = only
        count = len(work.hardware.devices)
        self._cap_bytes = [work.hardware.room_bytes(device) for device in range(count)]
        self._room_bytes = [share * cap for cap in self._cap_bytes]
        self.chosen: dict[int, int] = {}
        self._free_ns = [0.0] * count
        self._link_ns: dict[tuple[int, int], float] = {}
        self._end_ns: dict[int, float] = {}
        self._there_ns: dict[tuple[ValueId, int], float] = {}
        self._lives, self._peak = [0] * count, [0] * count
        self._held: dict[int, dict[int, int]] = {}
        """By a launch and a device, the bytes there of what it made."""

    @property
    def cost_ns(self) -> float:
        """When the last launch ends; over several devices, so much later that they are worth it."""
        end_ns = max(self._end_ns.values(), default=0.0)
        return end_ns if self._only is not None else end_ns * _WORTH

    @property
    def excess_bytes(self) -> float:
        """Bytes that the fullest device would hold beyond its memory."""
        pairs = zip(self._peak, self._cap_bytes, strict=True)
        return max([0.0, *[peak - cap for peak, cap in pairs]])

    def run(self) -> None:
        """Place launch after launch, those with the most before them first."""
        work = self._work
        readers: dict[int, list[int]] = {launch: [] for launch in work.reads}
        for launch in work.reads:
            for maker in work.before(launch):
                readers[maker].append(launch)
        waits = {launch: len(work.before(launch)) for launch in work.reads}
        left = {launch: len(own) for launch, own in readers.items()}
        for value in work.graph.roots():
            if work.maker[value] in left:
                left[work.maker[value]] += 1
        for root, device in work.pinned.items():
            self._choose(root, device)
        for root in work.counters:  # all devices read them: none is better
            if root not in self.chosen:
                self._choose(root, self._only or 0)
        # An update frees its gradient: where memory is short it does not wait for the end.
        is_short = min(self._cap_bytes) < inf
        is_early = [bool(is_short and node.writes) for node in work.graph.nodes]
        key = {i: -inf if is_early[i] else -rank for i, rank in work.rank.items()}
        ready = [(key[launch], launch) for launch, count in waits.items() if not count]
        heapq.heapify(ready)
        while ready:
            _, launch = heapq.heappop(ready)
            self._place(launch)
            for maker in work.before(launch):
                left[maker] -= 1
                if not left[maker]:
                    self._release(maker)
            for reader in readers[launch]:
                waits[reader] -= 1
                if not waits[reader]:
                    heapq.heappush(ready, (key[reader], reader))

    def _place(self, launch: int) -> None:
        """Let a launch run, on the device of its group, or on the one where it ends first."""
        work = self._work
        root = work.group[launch]
        if root not in self.chosen:
            able: Sequence[int] = work.able[root]
            if self._only is not None and self._only in able:
                able = (self._only,)
            fits = [d for d in able if not self._excess_at(launch, d)]
            cost = self._end_at if fits else self._excess_at
            self._choose(root, min(fits or able, key=lambda d: (cost(launch, d), d)))
        device = self.chosen[root]
        arrivals = self._arrivals(launch, device, self._link_ns)
        for value, at in arrivals.items():
            self._there_ns[value, device] = at
            held = self._held.get(work.maker[value])
            if held is not None and device not in held:
                held[device] = work.graph.types[value].size_bytes
                self._add(device, held[device])
        begin = max([self._free_ns[device], *arrivals.values()])
        self._free_ns[device] = self._end_ns[launch] = begin + (work.times[launch][device] or 0.0)
        self._held[launch] = {device: work.made_bytes(launch)}
        self._add(device, work.made_bytes(launch))

    def _choose(self, root: int, device: int) -> None:
        self.chosen[root] = device
        self._add(device, self._work.lasting.get(root, 0))

    def _add(self, device: int, size_bytes: int) -> None:
        self._lives[device] += size_bytes
        self._peak[device] = max(self._peak[device], self._lives[device])

    def _release(self, launch: int) -> None:
        for device, size_bytes in self._held.pop(launch).items():
            self._lives[device] -= size_bytes

    def _excess_at(self, launch: int, device: int) -> float:
        """Return by how much a device would be fuller than it may be with a launch there."""
        if self._room_bytes[device] == inf:
            return 0.0
        work = self._work
        new = work.lasting.get(work.group[launch], 0) + work.made_bytes(launch)
        for value in work.reads[launch]:
            if device not in self._held.get(work.maker[value], (device,)):
                new += work.graph.types[value].size_bytes
        return max(0.0, self._lives[device] + new - self._room_bytes[device])

    def _end_at(self, launch: int, device: int) -> float:
        """Return when a launch would end on a device."""
        arrivals = self._arrivals(launch, device, dict(self._link_ns))
        begin = max([self._free_ns[device], *arrivals.values()])
        return begin + (self._work.times[launch][device] or 0.0)

    def _arrivals(
        self, launch: int, device: int, link_ns: dict[tuple[int, int], float]
    ) -> dict[ValueId, float]:
        """Return when a device has what a launch reads; links are busy with it until then."""
        work, found = self._work, dict[ValueId, float]()
        for value in work.reads[launch]:
            maker = work.maker[value]
            home = self.chosen.get(work.group[maker], device)
            if work.graph.nodes[maker].op in _FLOATING:
                home = device
            at = self._there_ns.get((value, device), self._end_ns.get(maker, 0.0))
            if home != device and (value, device) not in self._there_ns:
                begin = max(at, link_ns.get((home, device), 0.0))
                size = work.graph.types[value].size_bytes
                at = link_ns[home, device] = begin + work.move_ns(home, device, size)
            found[value] = at
        return found
