"""A random actor graph and what happens to it: all that a run needs besides the order of events.

A seed makes the graph (rates, slots, streams, credits to start with, flushed actors, sources with
and without inputs), and what happens to it: steps admitted in parts, ends of admission with and
without a limit, a source without more data, a failure, a halt.

The graphs are live by construction: rates balance because they follow from chosen repetitions, and
the slots of an edge are what one sequential schedule of a period needs, plus up to two. So a
schedule exists, and by determinacy (Kahn 1974; Lee & Messerschmitt 1987) every order must finish.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random

from actors.table import Edge, MachineTable


class EventOrder(Enum):
    """What a command asks of the machine."""

    ADMIT = "admit"
    END = "end_admission"
    HALT = "halt"


@dataclass(frozen=True, slots=True)
class Command:
    """One call to the machine: `count` firings of `source`, or the limit of its end."""

    order: EventOrder
    source: int = 0
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """A graph and what happens to it.

    `ends` says after how many firings a source has no more data, `fails` names one actor and firing
    that raises.
    """

    table: MachineTable
    commands: tuple[Command, ...]
    ends: Mapping[int, int]
    fails: tuple[int, int] | None


def make_scenario(rng: Random) -> Scenario:
    """Return a random scenario."""
    table = random_table(rng)
    steps = rng.randint(0, 6)
    total = {s: steps * table.firings_per_step[s] for s in table.sources}
    parts = [_commands_of(rng, source, count) for source, count in total.items()]
    if rng.random() < 0.03:
        parts.append([Command(EventOrder.HALT)])
    fails = None
    if rng.random() < 0.1:
        fails = rng.randrange(table.num_actors), rng.randint(0, 3)
    ends = {s: rng.randint(0, count) for s, count in total.items() if rng.random() < 0.2}
    return Scenario(table, tuple(_merged(rng, parts)), ends, fails)


def _commands_of(rng: Random, source: int, total: int) -> list[Command]:
    """Admit a source in up to three parts, and end its admission once or twice."""
    commands: list[Command] = []
    left = total
    while left:
        count = left if len(commands) == 2 else rng.randint(1, left)
        commands.append(Command(EventOrder.ADMIT, source, count))
        left -= count
    limit = rng.randint(0, total) if rng.random() < 0.3 else None
    commands.append(Command(EventOrder.END, source, limit))
    if rng.random() < 0.1:
        commands.append(Command(EventOrder.END, source, rng.randint(0, total)))
    return commands


def _merged(rng: Random, parts: Sequence[list[Command]]) -> list[Command]:
    """Mix the parts at random; each keeps its order."""
    turns = [part for part in parts for _ in part]
    rng.shuffle(turns)
    place = {id(part): iter(part) for part in parts}
    return [next(place[id(part)]) for part in turns]


# -- the graph -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _ScenarioRegister:
    """A register under construction; a register with two consumers is one object at two edges."""

    name: str
    producer: int
    produce: int
    initial: int
    num_slots: int = 0


_Link = tuple[_ScenarioRegister, int, int]
"""Register, consumer, rate of the consumer."""


def random_table(rng: Random) -> MachineTable:
    """Return a random graph of 2-7 actors without cycles that every order of events can finish."""
    num_actors = rng.randint(2, 7)
    num_sources = rng.randint(1, min(2, num_actors))
    repeat = [rng.randint(1, 3) for _ in range(num_actors)]
    links: list[_Link] = []
    for consumer in range(num_sources, num_actors):
        for producer in sorted(rng.sample(range(consumer), min(consumer, rng.randint(1, 3)))):
            links.append(_link(rng, repeat, links, producer, consumer))
    _give_slots(repeat, links)
    for register in {id(link[0]): link[0] for link in links}.values():
        register.num_slots += rng.choice((0, 0, 1, 2))
    inner = range(num_sources, num_actors)
    is_shared = rng.random() < 0.5
    num_streams = rng.randint(1, num_actors)
    return MachineTable.from_edges(
        [f"a{i}" for i in range(num_actors)],
        [
            Edge(r.name, r.producer, consumer, r.produce, rate, r.num_slots, r.initial)
            for r, consumer, rate in links
        ],
        sources=[*range(num_sources), *[a for a in inner if rng.random() < 0.1]],
        flushed=[a for a in inner if rng.random() < 0.3],
        detached=[a for a in range(num_actors) if rng.random() < 0.3],
        streams=[rng.randrange(num_streams) for _ in repeat] if is_shared else None,
    )


def _link(
    rng: Random, repeat: list[int], links: list[_Link], producer: int, consumer: int
) -> _Link:
    """Return a link by an old register of the producer, where it fits, or else by a new one."""
    old = [link[0] for link in links if link[0].producer == producer]
    if old and rng.random() < 0.5:
        rate, rest = divmod(old[-1].produce * repeat[producer], repeat[consumer])
        if not rest and rate in (1, 2, 3):
            return old[-1], consumer, rate
    scale = 1 if max(repeat[producer], repeat[consumer]) > 1 else rng.randint(1, 3)
    initial = rng.randint(1, 4) if rng.random() < 0.25 else 0
    name = f"r{producer}.{len(old)}"
    register = _ScenarioRegister(name, producer, repeat[consumer] * scale, initial)
    return register, consumer, repeat[producer] * scale


def _give_slots(repeat: list[int], links: Sequence[_Link]) -> None:
    """Give each register the most tokens of the eager sequential schedule of one period."""
    left = list(repeat)
    tokens = [register.initial for register, _, _ in links]
    for register, _, _ in links:
        register.num_slots = register.initial
    while any(left):
        for actor, count in enumerate(left):
            takes = [(i, link[2]) for i, link in enumerate(links) if link[1] == actor]
            if not count or any([tokens[i] < rate for i, rate in takes]):
                continue
            left[actor] -= 1
            for i, (register, _, _) in enumerate(links):
                if register.producer == actor:
                    tokens[i] += register.produce
                    register.num_slots = max(register.num_slots, tokens[i])
            for i, rate in takes:
                tokens[i] -= rate
