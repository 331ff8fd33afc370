"""Run scenarios by the million: `python -m actors.testing.soak --first 0 --count 1000000`.

A seed is a scenario and an order of events; the oracle checks every one (`actors.testing.oracle`).
The seeds are shared among processes in blocks; the first seed that fails is replayed with its
story. Whoever stops the command is told how to go on.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from random import Random

from actors.machine.machine import Machine
from actors.machine.table import MachineTable
from actors.machine.transitions import CHANGES, KIND_MASK, Change, Message, State
from actors.testing.oracle import Scenario, make_scenario, play

BLOCK = 1000
"""Seeds per task of a process: half a second."""

CHECKED_SHARE = 16
"""Every so many seeds the machine is validated after every event; otherwise at the end only."""

_REPORT_EVERY_S = 10.0
_REPLAYED_MESSAGES = 40


class WatchedMachine(Machine):
    """A machine that notes in `changes` every change of state that a message makes."""

    __slots__ = ("changes",)

    def __init__(self, table: MachineTable, changes: set[tuple[int, int, int]]) -> None:
        self.changes = changes
        super().__init__(table)

    def receive(self, code: int) -> None:
        """Take one message and note what it changed."""
        state, actor = self.columns.state, self.columns.owner[code]
        before = state[actor]
        super().receive(code)
        self.changes.add((before, code & KIND_MASK, state[actor]))


@dataclass(frozen=True, slots=True)
class SeedBlock:
    """What the seeds from `first` on did. `failed` is the first seed that failed, if any."""

    first: int
    num_seeds: int
    num_events: int
    changes: frozenset[Change]
    failed: int | None


def run_block(first: int, count: int) -> SeedBlock:
    """Run the scenarios of `count` seeds, up to the first that fails."""
    changes: set[tuple[int, int, int]] = set()
    num_events = num_seeds = 0
    failed = None
    for seed in range(first, first + count):
        rng = Random(seed)
        scenario = make_scenario(rng)
        machine = WatchedMachine(scenario.table, changes)
        try:
            num_events += play(scenario, machine, rng, is_checked=seed % CHECKED_SHARE == 0)
            machine.validate()
        except Exception:
            # Whatever a machine with a fault raises, an IndexError too, is a finding.
            failed = seed
            break
        num_seeds += 1
    named = frozenset([(State(a), Message(kind), State(b)) for a, kind, b in changes])
    return SeedBlock(first, num_seeds, num_events, named, failed)


def replay(seed: int) -> str:
    """Run one seed again; return its graph, its commands, its last messages, and what it raised."""
    rng = Random(seed)
    scenario = make_scenario(rng)
    machine = Machine(scenario.table)
    try:
        play(scenario, machine, rng, is_checked=True)
        machine.validate()
        end = "it passes"
    except Exception as error:
        end = f"{type(error).__name__}: {error}"
    rows = [*_described(scenario), "last messages:", *machine.last_messages(_REPLAYED_MESSAGES)]
    return "\n  ".join([f"seed {seed}:", *rows, end])


def _described(scenario: Scenario) -> Iterable[str]:
    table = scenario.table
    for a, name in enumerate(table.names):
        marks = ["source"] * (table.admission[a] is not None) + ["flushed"] * table.is_flushed[a]
        yield f"{name}: stream {table.streams[a]} {' '.join(marks)}"
    yield from map(str, table.edges)
    yield from map(str, scenario.commands)
    yield f"sources end after {dict(scenario.ends)}; (actor, firing) that fails: {scenario.fails}"


def soak(
    blocks: Iterable[SeedBlock],
    total: int,
    clock: Callable[[], float],
    say: Callable[[str], object],
) -> int | None:
    """Add up the blocks in the order of their seeds, saying how far it is; return a failed seed."""
    start = last = clock()
    num_seeds = num_events = 0
    changes: set[Change] = set()
    for block in blocks:
        num_seeds += block.num_seeds
        num_events += block.num_events
        changes |= block.changes
        now = clock()
        is_over = block.failed is not None or num_seeds == total
        if now - last >= _REPORT_EVERY_S or is_over:
            last = now
            say(
                f"{num_seeds:,} of {total:,} seeds, {num_events:,} events,"
                f" {num_seeds / max(now - start, 1e-9):,.0f} seeds/s,"
                f" {len(changes)} of {len(CHANGES)} transitions;"
                f" next: --first {block.first + block.num_seeds}"
            )
        if block.failed is not None:
            return block.failed
    return None


def _blocks(first: int, count: int, num_processes: int) -> Iterable[SeedBlock]:
    starts = range(first, first + count, BLOCK)
    sizes = [min(BLOCK, first + count - start) for start in starts]
    if num_processes == 1:
        yield from map(run_block, starts, sizes)
        return
    with ProcessPoolExecutor(num_processes) as pool:
        try:
            yield from pool.map(run_block, starts, sizes)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 when a seed fails, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m actors.testing.soak", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--count", type=int, default=1_000_000, help="seeds (default 1000000)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    blocks = _blocks(options.first, options.count, max(1, options.processes))
    try:
        failed = soak(blocks, options.count, time.monotonic, lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        print("stopped; the last line says where to go on")
        return 130
    if failed is None:
        print("no seed fails")
        return 0
    print(replay(failed))
    print(f"replay it: python -m actors.testing.soak --first {failed} --count 1")
    return 1


if __name__ == "__main__":
    sys.exit(main())
