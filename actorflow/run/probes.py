"""What a run does with the outputs that probes name: prints, checks, breakpoints, ranges of values.

The values of a step come to the sink of its outputs, of every batch in turn, so all here runs on
that sink's thread and in the order of the program. A check that fails ends the run as a loss that
is not finite does.

**Ranges.** A plan that was compiled with `debug="nan"` shows of each value the least and the
largest finite number, and how many are NaN or infinite. The first op in the order of the graph
whose result is not finite is named; what it reads is finite, or came so from the batch or from a
parameter. A replay takes all ranges itself, with those values whole that it asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from actorflow.compile.plan_facts import sink_fields
from actorflow.environment.settings import is_worth_a_line
from actorflow.options.run_spec import RAISE, SKIP
from actorflow.run.broken_steps import NonFiniteLoss, is_scaled
from actorflow.tensor.probes import Predicate, ProbeEvent, fire, range_text, try_format
from actors.machine.protocol import Token
from compiler.contract.errors import PlanFormatError
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import Field
from compiler.contract.probe import ProbeKind, TensorProbe, ValueRange, is_probe, read_probe
from compiler.contract.types import TensorType

Array = np.ndarray[Any, Any]

_NUM_OF_RANGE = 5
"""Results of the op `value_range`; behind them a probe may have the value itself."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """A probe of a plan: the outputs that are its operands, the user's line, types within loops."""

    probe: TensorProbe
    names: tuple[str, ...]
    line: str
    types: tuple[TensorType, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    """Values of a probe at one time; within a loop a first axis of theirs is that loop's."""

    shown: _Shown
    values: tuple[Array, ...]
    loops: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ObservedValue:
    """What is known of one value of a batch: `row` says which it is, `line` is the user's.

    `least` and `most` are of the finite elements, `norm` is theirs; counts are of NaN and of
    infinities, all over the iterations of loops. `iteration` is the first one, of each loop around
    it, with an element that is not finite; `order` compares which values of a batch became so
    first. `array` is a copy of the value where it was asked for, with an axis first for each loop.
    """

    number: int
    row: ValueRange
    line: str
    least: float
    most: float
    num_nan: float
    num_inf: float
    norm: float
    iteration: tuple[int, ...]
    order: tuple[int, ...]
    array: Array | None

    @property
    def is_finite(self) -> bool:
        """Whether all elements are."""
        return not self.num_nan and not self.num_inf


RangeListener = Callable[[str, Sequence[ObservedValue]], None]
"""Takes the values of one batch, in the order of the graph, with a text of when that was."""


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """What a run says of its probes.

    `predicates` are those of the job's checks by probe, as far as its code is there; `rank` is
    what each line of one of several ranks begins with. `on_ranges` takes the place of the search
    for the first op whose result is not finite.
    """

    predicates: Mapping[int, Predicate]
    on_nan: str
    rank: str
    warn: Callable[[str], object]
    on_ranges: RangeListener | None = None


class ProbeReader:
    """Reads the probes among the outputs that come to a sink.

    Args:
        plan: what is run.
        sink: the name of the sink; one of an evaluation says so in its messages.
        options: of the run.

    Raises PlanFormatError for an output that should be a probe and is none.
    """

    def __init__(self, plan: Plan, sink: str, options: ProbeOptions) -> None:
        probes = _probes_of(plan, sink)
        self._options = options
        self._unit = "evaluation" if sink != "metrics" else "step"
        self._ranges = RangeReader(plan, [s for s in probes if _is_range(s)], options)
        self._shown = [shown for shown in probes if not _is_range(shown)]
        for shown in self._shown:
            probe = shown.probe
            if probe.kind is ProbeKind.PRINT:
                _check_format(shown)
            if probe.kind is ProbeKind.CHECK and probe.text and self._predicate(probe) is None:
                options.warn(
                    f"{shown.line}: af.debug.check is left out: its predicate {probe.text} is code"
                    " of the job, which a plan from a file does not have"
                )

    def bind(
        self, tokens: tuple[Token, ...], each: int
    ) -> tuple[tuple[Token, ...], Callable[[int, int], None]]:
        """Return the tokens without probes, and what reads these of the n-th step among them.

        `each` is the number of batches, and of tokens, of a step.
        """
        if not self._shown and self._ranges.is_empty:  # as of nearly every plan
            return tokens, lambda number, step: None
        bare = tuple([{n: v for n, v in t.items() if not is_probe(n)} for t in tokens])
        # What is made once per step has a token for each step, and not for each batch.
        rare = {n for n in tokens[0] if n not in tokens[-1]} if tokens else set()

        def see(number: int, step: int) -> None:
            for batch in range(each):
                text = f"at {self._unit} {step}"
                text += f", batch {batch + 1} of {each}" if each > 1 else ""
                token = tokens[number * each + batch]
                self._see({n: v for n, v in token.items() if n not in rare}, text)
            if rare:
                self._see({n: tokens[number][n] for n in rare}, f"at {self._unit} {step}")

        return bare, see

    def _see(self, token: Token, text: str) -> None:
        entries = [
            _Entry(s, tuple([token[n] for n in s.names]), s.probe.loops)
            for s in self._shown
            if s.names[0] in token
        ]
        self._fire(entries, ProbeEvent("", text, self._options.rank))
        self._ranges.see(token, text)

    def _fire(self, entries: Sequence[_Entry], event: ProbeEvent) -> None:
        """Do what probes do in their order; those of one loop at each of its steps."""
        for loop, grouped in groupby(entries, lambda entry: entry.loops[:1]):
            group = list(grouped)
            if not loop:
                for entry in group:
                    probe, line = entry.shown.probe, entry.shown.line
                    at = ProbeEvent(line, event.text, event.rank)
                    self._fire_one(probe, entry.values, at)
                continue
            length = len(group[0].values[0])
            for step in range(length)[:: -1 if loop[0] < 0 else 1]:
                inner = [
                    _Entry(e.shown, tuple([v[step] for v in e.values]), e.loops[1:]) for e in group
                ]
                self._fire(inner, event.at(step, length))

    def _fire_one(self, probe: TensorProbe, values: Sequence[Array], event: ProbeEvent) -> None:
        predicate = self._predicate(probe)
        if probe.kind is ProbeKind.CHECK and probe.text and predicate is None:
            return
        # Copies: the slot is written again as soon as the sink has read it, and a user may keep
        # what a predicate or a debugger shows.
        fire(probe, [np.array(value) for value in values], event, predicate)

    def _predicate(self, probe: TensorProbe) -> Predicate | None:
        return self._options.predicates.get(probe.number)


def _check_format(shown: _Shown) -> None:
    try:
        try_format(shown.probe.text, shown.types)
    except (ValueError, TypeError, IndexError) as error:
        text = f"the plan prints by a format {shown.probe.text!a:.60} at {shown.line}: {error}"
        raise PlanFormatError(text) from None


def _is_range(shown: _Shown) -> bool:
    return shown.probe.kind is ProbeKind.RANGE


def _probes_of(plan: Plan, sink: str) -> list[_Shown]:
    """Return the probes among the outputs that come to a sink, in the order of the program."""
    operands: dict[int, dict[int, Field]] = {}
    probes: dict[int, TensorProbe] = {}
    for field in sink_fields(plan, sink):
        if is_probe(field.name):
            probe, operand = read_probe(field.name)
            operands.setdefault(probe.number, {})[operand] = field
            if operand == 0:
                probes[probe.number] = probe
    return [_shown(plan, probes.get(n), operands[n]) for n in sorted(operands)]


def _shown(plan: Plan, probe: TensorProbe | None, operands: Mapping[int, Field]) -> _Shown:
    """Return a probe of a plan with its operands. Raises PlanFormatError where it lacks some."""
    fields = [operands[operand] for operand in sorted(operands)]
    types = [plan.views[field.view].type for field in fields]
    is_whole = probe is not None and sorted(operands) == list(range(len(operands)))
    if probe is None or not is_whole or min([t.rank for t in types]) < len(probe.loops):
        raise PlanFormatError(f"the plan has a probe {fields[0].name!a:.60} without its operands")
    if probe.kind is ProbeKind.RANGE and len(fields) not in (_NUM_OF_RANGE, _NUM_OF_RANGE + 1):
        raise PlanFormatError(
            f"the plan has a value range of {len(fields)} outputs, expected {_NUM_OF_RANGE}, and"
            " the value itself"
        )
    names, depth = tuple([field.name for field in fields]), len(probe.loops)
    within = tuple([replace(type_, shape=type_.shape[depth:]) for type_ in types])
    return _Shown(probe, names, str(plan.sources[fields[0].source]), within)


class RangeReader:
    """Finds the first op whose result is not finite, of a plan that shows ranges.

    Args:
        plan: what is run; its option `debug` says whether infinities count.
        shown: probes of the kind RANGE, in the order of the graph.
        options: of the run: under "raise" what is found ends it, else it is told.
    """

    def __init__(self, plan: Plan, shown: Sequence[_Shown], options: ProbeOptions) -> None:
        self._rows = {s.probe.number: (s, ValueRange.parse(s.probe.text)) for s in shown}
        for _, row in self._rows.values():
            if not {*row.inputs} <= {*self._rows}:
                raise PlanFormatError("a value range of the plan reads one that is not there")
        self._has_infinities = plan.option("debug") == "inf"
        self._options = options
        self._policy = SKIP if is_scaled(plan) else options.on_nan
        self._num_told = 0
        self._ops = [n for n, (_, row) in self._rows.items() if row.phase]

    @property
    def is_empty(self) -> bool:
        """Whether the plan shows no range."""
        return not self._rows

    def see(self, token: Token, text: str) -> None:
        """Look at the values of one batch. Raises NonFiniteLoss, naming the op."""
        if self._options.on_ranges is not None:
            self._options.on_ranges(text, self._observed(token))
            return
        ops = [n for n in self._ops if self._rows[n][0].names[0] in token]
        if not any([self._is_broken(self._counts(token, n)) for n in ops]):
            return
        found = self._first(ops, token, ())
        if found is not None:
            number, at = found
            iterations = "".join([f", iteration {step}" for step in at])
            self._report(number, token, at, text + iterations)

    def _first(
        self, ops: Sequence[int], token: Token, at: tuple[int, ...]
    ) -> tuple[int, tuple[int, ...]] | None:
        """Return the first op with a broken result, and the iterations of the loops around it."""
        for loop, grouped in groupby(ops, lambda n: self._loops(n)[len(at) : len(at) + 1]):
            group = list(grouped)
            if not loop:
                for number in group:
                    if self._is_broken(self._counts(token, number, at)):
                        return number, at
                continue
            length = len(token[self._rows[group[0]][0].names[0]][at])
            for step in range(length)[:: -1 if loop[0] < 0 else 1]:
                found = self._first(group, token, (*at, step))
                if found is not None:
                    return found
        return None

    def _loops(self, number: int) -> tuple[int, ...]:
        return self._rows[number][0].probe.loops

    def _counts(self, token: Token, number: int, at: tuple[int, ...] = ()) -> list[float]:
        """Return least, most, NaN and infinities of a value, over loops that `at` does not fix."""
        at, names = at[: len(self._loops(number))], self._rows[number][0].names
        least, most, num_nan, num_inf = [token[name][at] for name in names[:4]]
        return [float(least.min()), float(most.max()), float(num_nan.sum()), float(num_inf.sum())]

    def _observed(self, token: Token) -> list[ObservedValue]:
        """Return what is known of all values of a batch."""
        values: list[ObservedValue] = []
        begins: dict[tuple[int, ...], int] = {}
        for number, (shown, row) in self._rows.items():
            names, loops = shown.names, self._loops(number)
            if names[0] not in token:
                continue
            place = len(values)
            least, most, num_nan, num_inf = self._counts(token, number)
            array = None
            if len(names) > _NUM_OF_RANGE:
                array = np.array(token[names[_NUM_OF_RANGE]])  # the slot is written again
            iteration = _first_iteration(np.add(token[names[2]], token[names[3]]), loops)
            # What a loop makes is made in turns: all values of one iteration before the next one.
            around = [begins.setdefault(loops[: depth + 1], place) for depth in range(len(loops))]
            turns = [-i if loop < 0 else i for i, loop in zip(iteration, loops, strict=False)]
            order = [number for pair in zip(around, turns, strict=False) for number in pair]
            norm = float(np.linalg.norm(np.float64(token[names[4]])))
            values.append(
                ObservedValue(
                    number,
                    row,
                    shown.line,
                    least,
                    most,
                    num_nan,
                    num_inf,
                    norm,
                    iteration,
                    (*order, place),
                    array,
                )
            )
        return values

    def _is_broken(self, counts: Sequence[float]) -> bool:
        _, _, num_nan, num_inf = counts
        return num_nan > 0 or (self._has_infinities and num_inf > 0)

    def _report(self, number: int, token: Token, at: tuple[int, ...], text: str) -> None:
        shown, row = self._rows[number]
        inputs = [n for n in dict.fromkeys(row.inputs) if self._rows[n][0].names[0] in token]
        words = {n: range_text(*self._counts(token, n, at)) for n in (number, *inputs)}
        broken = [n for n in inputs if self._is_broken(self._counts(token, n, at))]
        what = f"{row.what} ({shown.line}, {row.phase} pass)"
        if broken:
            came = " and ".join([f"{self._rows[n][1].what} ({words[n]})" for n in broken])
            message = f"{came} was not finite already {text}, when {what} read it"
        else:
            named = [f"{self._rows[n][1].what}, {self._rows[n][1].type} {words[n]}" for n in inputs]
            message = (
                f"{what} is the first op whose result is not finite {text}: {row.type}"
                f" {words[number]}; it reads {'; '.join(named) or 'no floats'}"
            )
        message = f"{self._options.rank}{message}"
        if self._policy == RAISE:
            raise NonFiniteLoss(message)
        self._num_told += 1
        if is_worth_a_line(self._num_told):
            self._options.warn(message)


def _first_iteration(counts: Array, loops: Sequence[int]) -> tuple[int, ...]:
    """Return the first iteration of some loops that counts something; () where none does."""
    # A loop below 0 goes backwards. The last axis is no loop's.
    flip = tuple([slice(None, None, -1 if loop < 0 else 1) for loop in loops])
    places = np.argwhere(counts[flip])
    if not len(places):
        return ()
    return tuple(
        [
            counts.shape[axis] - 1 - int(at) if loop < 0 else int(at)
            for axis, (at, loop) in enumerate(zip(places[0], loops, strict=False))
        ]
    )
