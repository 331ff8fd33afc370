"""Every state that the machine itself can reach in a study: the model's own check.

A proof about a model says nothing about a machine that differs from it. So here the machine, not
the model, is taken through every order of the same events, and its states are counted. Where spin
counts as many, the model lets happen what the machine does: a reaction that does more or less, in
any order of events, leads to states that the other does not have.

Source: explicit-state search with a set of visited states (Holzmann, 1991, chapter 11).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from actors.explore import channel_of
from actors.machine import Machine
from actors.proof.study import Study
from actors.transitions import Message, State, message
from compiler.errors import InternalError

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


class _Restorable(Machine):
    """A machine that can go back to where it was; messages and firings are kept outside."""

    __slots__ = ()

    def snapshot(self) -> _Snapshot:
        columns = self.columns
        lists = [tuple(getattr(columns, field)) for field in _FIELDS]
        return (*lists, columns.num_open, columns.is_halted)

    def restore(self, snapshot: _Snapshot) -> None:
        columns = self.columns
        *lists, columns.num_open, columns.is_halted = snapshot  # type: ignore[assignment]  # as saved
        for field, values in zip(_FIELDS, lists, strict=True):
            getattr(columns, field)[:] = values


def reach(study: Study) -> StateSpace:
    """Take the machine through every order of events and validate it in every state.

    Raises InternalError for a state that breaks an invariant, and for one in which nothing can
    happen although not every actor has ended.
    """
    search = _StateSearch(study)
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

    def __init__(self, study: Study) -> None:
        self.study = study
        self.table = study.table
        self.machine = _Restorable(study.table)
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
