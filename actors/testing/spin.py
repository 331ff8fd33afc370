"""Check the protocol exhaustively on a family of small plans: `python -m actors.testing.spin`.

Every plan becomes a Promela model (`actors.testing.promela`), and spin tries every order of its
events. Where that takes seconds, the machine itself is taken through them too, and must have
exactly the states that the model has (`reach`). Together the plans must enter every cell of the
transition table. A few faults, seeded into the table or into what is sent, must be found, or the
check is worth nothing. Needs spin and a C compiler; prints Markdown tables.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from actors.machine.machine import Machine
from actors.machine.table import Edge, MachineTable
from actors.machine.transitions import (
    CHANGES,
    TRANSITIONS,
    Change,
    Message,
    Reaction,
    State,
    Transition,
    message,
)
from actors.testing.oracle import channel_of
from actors.testing.promela import NO_BUG, Bug, ModelCheckCase, Table, model
from compiler.contract.errors import ActorflowError, InternalError

# Why the machine's own states are counted: a proof about a model says nothing about a machine that
# differs from it. So here the machine, not the model, is taken through every order of the same
# events, and its states are counted. Where spin counts as many, the model lets happen what the
# machine does: a reaction that does more or less, in any order of events, leads to states that the
# other does not have.
#
# Source: explicit-state search with a set of visited states (Holzmann, 1991, chapter 11).

_FIELDS = (
    "level", "state", "unmet", "firings", "has_end", "is_ended", "flush_tokens", "refill",
)  # fmt: skip

_T = TypeVar("_T")
_Channels = tuple[tuple[int, ...], ...]
_Snapshot = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class StateSpace:
    """How many states there are, and in how many of them a run can be over."""

    num_states: int
    num_ends: int


class _SearchNode(NamedTuple):
    """A state of a run; `due` and `asked` are what was asked of each source."""

    snapshot: _Snapshot
    channels: _Channels
    due: tuple[int, ...]
    asked: tuple[bool, ...]


class RestorableMachine(Machine):
    """A machine that can go back to where it was; messages and firings are kept outside."""

    __slots__ = ()

    def snapshot(self) -> _Snapshot:
        """Return all that the machine knows."""
        columns = self.columns
        lists = [tuple(getattr(columns, field)) for field in _FIELDS]
        return (*lists, columns.num_open, columns.is_halted)

    def restore(self, snapshot: _Snapshot) -> None:
        """Make the machine what it was at a snapshot."""
        columns = self.columns
        *lists, columns.num_open, columns.is_halted = snapshot  # type: ignore[assignment]  # as saved
        for name, values in zip(_FIELDS, lists, strict=True):
            getattr(columns, name)[:] = values


def reach(study: ModelCheckCase, machine_type: type[RestorableMachine] | None = None) -> StateSpace:
    """Take the machine through every order of events and validate it in every state.

    `machine_type` may be a machine with a fault. Raises InternalError for a state that breaks an
    invariant, and for one in which nothing can happen although not every actor has ended.
    """
    search = _StateSearch(study, machine_type or RestorableMachine)
    start = search.start()
    seen, front, num_ends = {start}, [start], 0
    while front:
        node = front.pop()
        is_over = search.is_over(node)
        num_ends += is_over
        after = list(search.after(node))
        if not after and not is_over:
            search.machine.restore(node.snapshot)
            raise InternalError("the plan cannot finish: " + search.machine.stall())
        for other in after:
            if other not in seen:
                seen.add(other)
                front.append(other)
    return StateSpace(len(seen), num_ends)


class _StateSearch:
    """The events that can follow a state."""

    def __init__(self, study: ModelCheckCase, machine_type: type[RestorableMachine]) -> None:
        self.study = study
        self.table = study.table
        self.machine = machine_type(study.table)
        self.actors = range(study.table.num_actors)

    def start(self) -> _SearchNode:
        """The state in which every run begins."""
        nobody: _Channels = ((),) * (2 * len(self.table.edges))
        zeros, never = (0,) * len(self.actors), (False,) * len(self.actors)
        return self._node(nobody, zeros, never)

    def is_over(self, node: _SearchNode) -> bool:
        """Whether every actor has ended, or the machine has halted and nothing is left."""
        machine = self.machine
        machine.restore(node.snapshot)
        is_quiet = machine.is_quiescent and not any(node.channels)
        return machine.is_finished or (machine.is_halted and is_quiet)

    def after(self, node: _SearchNode) -> Iterator[_SearchNode]:
        """Yield the state after each event that can happen."""
        machine, (snapshot, channels, due, asked) = self.machine, node
        machine.restore(snapshot)
        states = [machine.state(actor) for actor in self.actors]
        begun = [machine.firing_index(actor) + 1 for actor in self.actors]
        for index, channel in enumerate(channels):
            if channel:
                machine.restore(snapshot)
                machine.receive(channel[0])
                yield self._node(_with(channels, index, channel[1:]), due, asked)
        for a, state in enumerate(states):
            for kind in self._ends_of_firing(a, state):
                machine.restore(snapshot)
                machine.receive(message(kind, a))
                is_out = kind is Message.EXHAUSTED
                yield self._node(channels, _with(due, a, begun[a] - 1) if is_out else due, asked)
        for a in self.table.sources:
            if asked[a] or states[a] >= State.DRAINING:
                continue
            if due[a] < self.study.permits(a):
                machine.restore(snapshot)
                machine.admit(a, 1)
                yield self._node(channels, _with(due, a, due[a] + 1), asked)
            for limit in (*range(due[a] if self.study.is_limited else 0), None):
                machine.restore(snapshot)
                machine.end_admission(a, limit)
                least = due[a] if limit is None else min(due[a], max(begun[a], limit))
                yield self._node(channels, _with(due, a, least), _with(asked, a, True))

    def _ends_of_firing(self, actor: int, state: State) -> Iterator[Message]:
        if state in (State.FIRING, State.FLUSHING):
            yield Message.DONE
            if actor in self.study.failing:
                yield Message.FAILED
        is_source = self.table.admission[actor] is not None
        if state is State.FIRING and is_source and self.study.is_exhausting:
            yield Message.EXHAUSTED

    def _node(
        self, channels: _Channels, due: tuple[int, ...], asked: tuple[bool, ...]
    ) -> _SearchNode:
        """Take over what the machine sent and started."""
        machine, moving = self.machine, list(channels)
        for code in machine.outbox:
            moving[channel_of(code)] += (code,)
        machine.outbox.clear()
        machine.fireable.clear()
        machine.detached.clear()
        machine.flushing.clear()
        machine.validate([code for channel in moving for code in channel])
        return _SearchNode(machine.snapshot(), tuple(moving), due, asked)


def _with(row: tuple[_T, ...], index: int, value: _T) -> tuple[_T, ...]:
    return (*row[:index], value, *row[index + 1 :])


_MAX_DEPTH = 1_000_000
_MAX_MIB = 6000
_MAX_COMPARED = 8000
"""Most states of a model for which those of the machine are counted, at 0.3 ms each."""

_STATES_PER_END = 4
"""States that spin counts after the end of a run, where the model checks how it came out."""

_COMPILE = ("-O1", "-w", "-DSAFETY", "-DNOREDUCE", f"-DMEMLIM={_MAX_MIB}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What spin says of a model. `error` is empty when every order of events keeps every rule.

    `num_machine_states` is how many states the machine itself has; None where it was not counted.
    """

    name: str
    num_states: int
    num_transitions: int
    depth: int
    seconds: float
    error: str
    changes: frozenset[Change]
    num_machine_states: int | None = None


@dataclass(frozen=True, slots=True)
class ProtocolFault:
    """A fault in the protocol: a changed cell of the table, or a message not sent or sent twice."""

    name: str
    study: str
    transitions: Table = field(default_factory=lambda: TRANSITIONS)
    bug: Bug = NO_BUG


def table_of(
    links: str, *, sources: Sequence[int] = (0,), flushed: Sequence[int] = ()
) -> MachineTable:
    """Return a table from links like "0>1:2/3*4+1": rates 2 and 3, 4 slots, 1 initial token.

    Rates are 1 and initial tokens 0 if they are not given. Links of the form "0>1,2" are one
    register with two consumers.
    """
    edges: list[Edge] = []
    for number, link in enumerate(links.split()):
        match = _LINK.fullmatch(link)
        if match is None:
            raise ValueError(f"expected a link like 0>1:2/3*4+1, got {link!r}")
        produce, consume, slots, initial = [int(match[i] or 1) for i in (3, 4, 5)] + [
            int(match[6] or 0)
        ]
        edges += [
            Edge(f"r{number}", int(match[1]), int(consumer), produce, consume, slots, initial)
            for consumer in match[2].split(",")
        ]
    num_actors = 1 + max([max(edge.producer, edge.consumer) for edge in edges])
    names = [f"a{i}" for i in range(num_actors)]
    return MachineTable.from_edges(names, edges, sources=sources, flushed=flushed)


_LINK = re.compile(r"(\d+)>([\d,]+)(?::(\d+)/(\d+))?(?:\*(\d+))?(?:\+(\d+))?")


def _family() -> Iterator[tuple[str, ModelCheckCase]]:
    for slots in (1, 2, 3):
        s = f"*{slots}"
        chain = [f"{a}>{a + 1}{s}" for a in range(4)]
        diamond = f"0>1{s} 0>2{s} 1>3{s} 2>3{s}"
        two = table_of(f"0>2{s} 1>2{s} 2>3{s}", sources=[0, 1])
        accumulate = table_of(f"0>1{s} 1>2:1/2*{slots + 1} 2>3{s}")
        metrics = table_of(f"0>1{s} 1>2:1/3*{slots + 2} 2>3{s}", flushed=[2])
        snapshot = table_of(f"0>1{s} 1>2:1/2*2 2>3{s} 1>4{s}", flushed=[2])
        fork = table_of(f"0>1,2,3{s} 1>4{s} 2>4{s} 3>4*1")
        failing = ModelCheckCase(table_of(diamond), 3, failing=(0, 1, 2, 3))
        pair = ModelCheckCase(table_of(chain[0]), 6, is_exhausting=True, is_limited=True)
        joined = ModelCheckCase(two, 3, is_exhausting=True, is_limited=True)
        yield f"pair, {slots} slots", pair
        limited = ModelCheckCase(table_of(" ".join(chain[:2])), 5, is_limited=True)
        yield f"chain of 3, {slots} slots", limited
        yield f"chain of 4, {slots} slots", ModelCheckCase(table_of(" ".join(chain[:3])), 5)
        yield f"chain of 5, {slots} slots", ModelCheckCase(table_of(" ".join(chain)), 4)
        yield f"diamond, {slots} slots", ModelCheckCase(table_of(diamond), 4)
        yield f"fork and join, {slots} slots", ModelCheckCase(fork, 3)
        yield (
            f"skip past a chain, {slots} slots",
            ModelCheckCase(table_of(f"0>1{s} 1>2{s} 0>2{s}"), 5),
        )
        yield f"accumulate 2:1 and log, {slots} slots", ModelCheckCase(accumulate, 5)
        yield f"metrics 3:1, flushed, {slots} slots", ModelCheckCase(metrics, 5)
        yield f"snapshot, flushed with staging, {slots} slots", ModelCheckCase(snapshot, 4)
        exhausted = ModelCheckCase(table_of(f"0>1{s} 1>2{s} 1>3{s}"), 4, is_exhausting=True)
        yield f"source that is exhausted, {slots} slots", exhausted
        yield f"two sources with limits and ends, {slots} slots", joined
        yield f"any actor fails, {slots} slots", failing
    yield (
        "scatter 1:3 and gather 2:1",
        ModelCheckCase(table_of("0>1:3/1*4 1>2:1/2*3"), 4, is_limited=True),
    )
    yield "rates 2:3 and 3:2", ModelCheckCase(table_of("0>1:2/3*4 1>2:3/2*5", flushed=[2]), 5)
    yield (
        "two flushed in a row",
        ModelCheckCase(table_of("0>1:1/2*2 1>2:1/2*2 2>3*1", flushed=[1, 2]), 6),
    )
    yield (
        "flushed join of two rates",
        ModelCheckCase(table_of("0>1:1/2*2 0>2*2 1>2:2/1*2", flushed=[2]), 5),
    )
    late = ModelCheckCase(table_of("0>1*2 1>2:1/2*2 2>3*1", flushed=[2]), 4, failing=(2,))
    yield "flushed after a failure", late
    between = "0>2:1/2*2 1>2*3+1 1>3:1/2*2 2>3:1/2*2 2>4*1"
    failing = ModelCheckCase(table_of(between, sources=[0, 1], flushed=[2]), 3, failing=(2,))
    yield "flushed between two sources, may fail", failing
    yield (
        "credits to start with",
        ModelCheckCase(table_of("0>1*2 1>2:1/3*3+2 2>3*1"), 5, is_exhausting=True),
    )
    yield (
        "credits for a firing at birth",
        ModelCheckCase(table_of("0>1*1 1>2:1/2*3+3", flushed=[2]), 4),
    )
    yield (
        "loop with credits",
        ModelCheckCase(table_of("0>1*2 1>2*1 2>1*1+1"), 4, is_exhausting=True),
    )
    yield "source with an input", ModelCheckCase(table_of("0>1:1/2*3 1>2*2", sources=[0, 1]), 6)
    yield "two parts", ModelCheckCase(table_of("0>2*2 1>3*1", sources=[0, 1]), 3, is_limited=True)


FAMILY: Mapping[str, ModelCheckCase] = MappingProxyType(dict(_family()))
"""Plans of up to five actors, every shape with 1 to 3 slots."""


def _cell(state: State, kind: Message, reaction: Reaction) -> Table:
    """Return the transition table with another reaction in one cell."""
    row = dict(TRANSITIONS[state])
    row[kind] = Transition(reaction, tuple(State))
    return {**TRANSITIONS, state: row}


_JOIN = "two sources with limits and ends, 1 slots"
_CHAIN, _SNAPSHOT = "chain of 3, 2 slots", "snapshot, flushed with staging, 1 slots"
_S, _M, _R = State, Message, Reaction
FAULTS: tuple[ProtocolFault, ...] = (
    ProtocolFault("no Free is sent", _CHAIN, bug=Bug(lost=_M.FREE)),
    ProtocolFault("every Ready is sent twice", _CHAIN, bug=Bug(doubled=_M.READY)),
    ProtocolFault("no Return is sent", _SNAPSHOT, bug=Bug(lost=_M.RETURN)),
    ProtocolFault("End is sent twice", _CHAIN, bug=Bug(doubled=_M.END)),
    ProtocolFault("WAITING takes no notice of END", _CHAIN, _cell(_S.WAITING, _M.END, _R.NOTE_END)),
    ProtocolFault("FIRING ends at END", _CHAIN, _cell(_S.FIRING, _M.END, _R.SETTLE_END)),
    ProtocolFault("DRAINING keeps what is READY", _JOIN, _cell(_S.DRAINING, _M.READY, _R.COUNT)),
    ProtocolFault("DRAINING forgets to settle", _CHAIN, _cell(_S.DRAINING, _M.FREE, _R.COUNT)),
    ProtocolFault("CLOSING never flushes", _SNAPSHOT, _cell(_S.CLOSING, _M.FREE, _R.COUNT)),
    ProtocolFault(
        "FLUSHING goes on as FIRING", _SNAPSHOT, _cell(_S.FLUSHING, _M.DONE, _R.COMPLETE)
    ),
)


def check(name: str, text: str, folder: Path) -> Verdict:
    """Let spin try every order of events of a model, in a folder of its own.

    Raises ActorflowError when spin or the compiler does not accept the model.
    """
    folder.mkdir(parents=True)
    (folder / "model.pml").write_text(text)
    start = time.monotonic()
    _call(["spin", "-a", "model.pml"], folder)
    _call([_compiler(), *_COMPILE, "-o", "pan", "pan.c"], folder)
    output = _call(["./pan", "-n", f"-m{_MAX_DEPTH}"], folder)
    return verdict_of(name, output, time.monotonic() - start)


def _call(command: list[str], folder: Path) -> str:
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if process.returncode:
        raise ActorflowError(
            f"{' '.join(command)} in {folder} ended with {process.returncode}:\n"
            f"{process.stdout[-2000:]}{process.stderr[-2000:]}"
        )
    return process.stdout


def _compiler() -> str:
    return os.environ.get("CC", "cc")


def verdict_of(name: str, output: str, seconds: float) -> Verdict:
    """Read what the verifier printed."""
    error = re.search(r"^pan:\d+: (.*)$", output, re.MULTILINE)
    states = re.search(r"(\d+) states, stored", output)
    transitions = re.search(r"(\d+) transitions", output)
    depth = re.search(r"depth reached (\d+)", output)
    count = re.search(r"errors: (\d+)", output)
    if not (states and transitions and depth and count):
        raise ActorflowError(f"spin's verifier printed no result for {name!r}:\n{output[-2000:]}")
    text = error[1] if error else "" if count[1] == "0" else f"{count[1]} errors"
    if "max search depth too small" in output:
        text = text or f"the search is deeper than {_MAX_DEPTH}"
    changes = [
        (tuple(State)[int(before)], Message(int(kind)), tuple(State)[int(after)])
        for before, kind, after in re.findall(r"^reached (\d+) (\d+) (\d+)$", output, re.MULTILINE)
    ]
    return Verdict(
        name, int(states[1]), int(transitions[1]), int(depth[1]), seconds, text, frozenset(changes)
    )


def missing_tools() -> str:
    """Return what is missing to run the checks and how to get it; empty when nothing is."""
    tools = {"spin": "spin", _compiler(): "gcc"}
    lacking = [tool for tool in tools if shutil.which(tool) is None]
    if not lacking:
        return ""
    packages = " ".join([tools[tool] for tool in lacking])
    return f"not found: {', '.join(lacking)}; on Debian or Ubuntu: apt install {packages}"


_COLUMNS = "plan | states of the model | of the machine | events | depth | s"


def _report(verdicts: Iterable[Verdict], *, is_killed: bool) -> list[Verdict]:
    """Print a row per model; return the verdicts."""
    head = "fault | found after | how" if is_killed else _COLUMNS
    print(f"| {head} |\n|{'---|' * (head.count('|') + 1)}")
    rows = []
    for v in verdicts:
        rows.append(v)
        if is_killed:
            print(f"| {v.name} | {v.num_states:,} states | {v.error or 'SURVIVES'} |", flush=True)
            continue
        own = "-" if v.num_machine_states is None else f"{v.num_machine_states:,}"
        figures = f"{v.num_states:,} | {own} | {v.num_transitions:,} | {v.depth} | {v.seconds:.1f}"
        print(f"| {v.name} | {figures} |{' FAILS: ' + v.error if v.error else ''}", flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the family and the faults.

    Returns 1 when a plan fails, a fault survives, or a cell of the table is never entered; 2 when
    a tool is missing.
    """
    parser = argparse.ArgumentParser(prog="python -m actors.testing.spin", description=__doc__)
    parser.add_argument("--only", default="", help="plans whose name contains this; no faults")
    parser.add_argument("--keep", type=Path, help="write models and verifiers to this folder")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    lacking = missing_tools()
    if lacking:
        print(lacking, file=sys.stderr)
        return 2
    with (
        nullcontext(options.keep) if options.keep else TemporaryDirectory() as place,
        ThreadPoolExecutor(max(1, options.processes)) as pool,
    ):
        names = [name for name in FAMILY if options.only in name]
        start = time.monotonic()
        proved = _report(pool.map(partial(prove, Path(place)), names), is_killed=False)
        print()
        find = partial(find_fault, Path(place))
        killed = [] if options.only else _report(pool.map(find, FAULTS), is_killed=True)
    changes = frozenset().union(*[v.changes for v in proved])
    unseen = [] if options.only else [change for change in CHANGES if change not in changes]
    failed, survivors = [v for v in proved if v.error], [v for v in killed if not v.error]
    print(
        f"\n{len(proved)} plans, {sum([v.num_states for v in proved]):,} states in"
        f" {time.monotonic() - start:.0f} s, {len(changes)} of {len(CHANGES)} changes of"
        f" state happen; {len(failed)} fail;"
        f" {len(killed)} faults, {len(survivors)} survive"
    )
    return 1 if failed or survivors or unseen else 0


def prove(place: Path, name: str) -> Verdict:
    """Check a plan of the family, and that model and machine have the same number of states."""
    verdict = check(name, model(FAMILY[name]), _folder(place, name))
    if verdict.error or verdict.num_states > _MAX_COMPARED:
        return verdict
    space = reach(FAMILY[name])
    # One more state is spin's own, before the plan's first.
    counted = verdict.num_states - 1 - _STATES_PER_END * space.num_ends
    same = counted == space.num_states
    error = "" if same else f"the machine has {space.num_states} states, the model {counted}"
    return replace(verdict, error=error, num_states=counted, num_machine_states=space.num_states)


def find_fault(place: Path, fault: ProtocolFault) -> Verdict:
    """Check the model with a fault in it, in a folder of its own."""
    text = model(FAMILY[fault.study], fault.transitions, fault.bug)
    return check(fault.name, text, _folder(place, fault.name))


def _folder(place: Path, name: str) -> Path:
    return place / re.sub(r"\W+", "-", name)


if __name__ == "__main__":
    sys.exit(main())
