"""The protocol as a Promela model, for the model checker spin: every order of events of a plan.

What a message does in a state is generated from the transition table, cell by cell, and after every
reaction the state must be one that the cell allows; so whoever changes a cell changes the model.
What the reactions *mean* is written here a second time, in the plainest form: tokens and slots are
counted, and no counter of unmet conditions, no refill and no posts of the machine are found here.

An event is one atomic step: a message is delivered, a firing ends, a source is admitted once more,
or its admission ends (at any time, so the model runs for every number of steps up to a bound). Spin
tries all orders. It checks, after every event, that each edge accounts for exactly its slots; that
no illegal message is ever received; that a run stops only when every actor has ended (any other
end is a deadlock), and that then all slots are home and every actor has fired as often as the rates
say. A bounded admission makes every run finite, so without a deadlock every run comes to its end.

Source: Holzmann, "The Model Checker SPIN", IEEE Trans. Software Engineering 23(5), 1997.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from actors.machine.table import OUTSIDE, MachineTable
from actors.machine.transitions import TRANSITIONS, Message, Reaction, State, Transition

_INDENT = "    "


def indented(lines: Iterable[str]) -> list[str]:
    """Return lines one step further in."""
    return [_INDENT + line for line in lines]


def block(head: str, body: Iterable[str]) -> list[str]:
    """Return a head and its body in braces."""
    return [f"{head} {{", *indented(body), "}"]


def inline(head: str, conditions: list[str], body: list[str]) -> list[str]:
    """An inline that does something if all conditions hold."""
    guard = " && ".join(conditions) or "true"
    choice = ["if", f":: {guard} ->", *indented(body), ":: else -> skip", "fi;"]
    return block(f"inline {head}", choice)


def event(guard: str, body: list[str]) -> list[str]:
    """Return one choice of the loop of events, done at once, after which all is checked."""
    return [":: d_step {", *indented([f"{guard} ->", *body, "check();"]), "}"]


def delivery(channel: str, kinds: Mapping[Message, list[str]]) -> list[str]:
    """Return the choice by the kind of the message that a channel holds."""
    choice = ["if"]
    for kind, body in kinds.items():
        choice += [f":: m == {kind.name} ->", *indented(body)]
    return event(f"nempty({channel})", [f"{channel}?m;", *choice, "fi;"])


def repeated(counter: str, channel: str) -> list[str]:
    """Send as many RETURNs as a counter says, and set it to 0."""
    return [
        f"n = {counter};",
        f"{counter} = 0;",
        f"do :: n > 0 -> send_RETURN_{channel}(); n = n - 1 :: else -> break od;",
    ]


def least(terms: list[str]) -> str:
    """Return the expression for the least of some."""
    least = terms[0]
    for other in terms[1:]:
        least = f"({least} < {other} -> {least} : {other})"
    return least


def any_(conditions: list[str]) -> str:
    """Return the expression that is true where one of some is."""
    return " || ".join([f"({c})" if "&&" in c else c for c in conditions]) or "false"


@dataclass(frozen=True, slots=True)
class ModelCheckCase:
    """What is to be tried on a plan.

    Every source is admitted up to `firings` times its firings per step; it may find no more data at
    any firing if `is_exhausting`, and its admission may end with any lower limit if `is_limited`.
    Each actor in `failing` may fail at any firing.
    """

    table: MachineTable
    firings: int
    is_exhausting: bool = False
    is_limited: bool = False
    failing: tuple[int, ...] = ()

    def permits(self, source: int) -> int:
        """Return how often a source is admitted at most."""
        return self.firings * self.table.firings_per_step[source]


@dataclass(frozen=True, slots=True)
class Bug:
    """A fault to seed into the reactions, in the place of one message to send."""

    lost: Message | None = None
    doubled: Message | None = None


NO_BUG = Bug()


Table = Mapping[State, Mapping[Message, Transition]]

_REACH = f"""\
c_decl {{
    static char is_reached[{len(State)}][{len(Message)}][{len(State)}];
    static void reach(int before, int kind, int after)
    {{
        if (!is_reached[before][kind][after])
            printf("reached %d %d %d\\n", before, kind, after);
        is_reached[before][kind][after] = 1;
    }}
}}"""
"""Tells each change of state once; no part of the model's own state."""


def model(study: ModelCheckCase, transitions: Table = TRANSITIONS, bug: Bug = NO_BUG) -> str:
    """Return the Promela text of a study; `transitions` and `bug` are for seeded faults."""
    return _Writer(study, transitions, bug).text()


class _Writer:
    """Writes the model; every method returns Promela statements, one per line."""

    def __init__(self, study: ModelCheckCase, transitions: Table, bug: Bug) -> None:
        self.study = study
        self.table = study.table
        self.transitions = transitions
        self.bug = bug
        self.actors = range(study.table.num_actors)
        self.edges = [i for i, e in enumerate(study.table.edges) if e.producer != OUTSIDE]

    def text(self) -> str:
        """Return the whole model."""
        parts = [
            self._declarations(),
            *[self._channel(edge) for edge in self.edges],
            *[self._actor(actor) for actor in self.actors],
            self._check(),
            self._machine(),
        ]
        return "\n\n".join(["\n".join(part) for part in parts]) + "\n"

    # -- declarations ------------------------------------------------------------------------------

    def _declarations(self) -> list[str]:
        num_edges, num_actors = len(self.table.edges), len(self.actors)
        names = [f"/* actor {a}: {self.table.names[a]} */" for a in self.actors]
        return [
            *names,
            *[f"#define {kind.name} {kind.value}" for kind in Message if kind <= Message.END],
            *[f"#define S_{state.name} {index}" for index, state in enumerate(State)],
            "",
            f"byte state[{num_actors}];   /* what an actor is doing */",
            f"byte fired[{num_actors}];   /* firings begun */",
            f"byte ready[{num_edges}];   /* tokens at the consumer */",
            f"byte free[{num_edges}];   /* slots at the producer */",
            f"byte held[{num_edges}];   /* tokens that a firing reads */",
            f"byte busy[{num_edges}];   /* slots that a firing writes */",
            f"byte moving[{num_edges}];   /* slots under way in messages */",
            f"bit ended[{num_edges}];   /* no token follows */",
            f"byte due[{num_actors}];   /* firings that a source was admitted to */",
            f"bit asked[{num_actors}];   /* the end of admission was asked for */",
            "bit halted;",
            "hidden byte m, n;",
            _REACH,
        ]

    def _channel(self, index: int) -> list[str]:
        """The two directions of an edge; no more can be under way than its slots and its end."""
        edge = self.table.edges[index]
        return [
            f"/* edge {index}: {edge.name}, {edge.produce} to {edge.consume},"
            f" {edge.num_slots} slots, {edge.initial} initial tokens */",
            f"chan to{index} = [{edge.num_slots // edge.produce + 1}] of {{ byte }};",
            f"chan from{index} = [{edge.num_slots}] of {{ byte }};",
            *self._sender(Message.READY, f"to{index}", f"moving[{index}]", edge.produce),
            *self._sender(Message.END, f"to{index}", "", 0),
            *self._sender(Message.FREE, f"from{index}", f"moving[{index}]", edge.consume),
            *self._sender(Message.RETURN, f"from{index}", f"moving[{index}]", 1),
        ]

    def _sender(self, kind: Message, channel: str, moving: str, count: int) -> list[str]:
        send = [f"assert(nfull({channel}));", f"{channel}!{kind.name};"]
        if moving:
            send.append(f"{moving} = {moving} + {count};")
        times = 0 if kind is self.bug.lost else 2 if kind is self.bug.doubled else 1
        return block(f"inline send_{kind.name}_{channel}()", send * times or ["skip;"])

    # -- reactions ---------------------------------------------------------------------------------

    def _actor(self, a: int) -> list[str]:
        """The steps of an actor that several reactions share."""
        inputs, outputs, edges = self.table.inputs[a], self.table.outputs[a], self.table.edges
        every = self.table.all_inputs(a)
        has_tokens = [f"ready[{e}] >= {edges[e].consume}" for e in every]
        has_slots = [f"free[{e}] >= {edges[e].produce}" for e in outputs]
        is_short = [f"ended[{e}] && ready[{e}] < {edges[e].consume}" for e in every]
        is_done = [f"(ended[{e}] || ready[{e}] >= {edges[e].consume})" for e in inputs]
        is_home = [f"free[{e}] == {edges[e].num_slots}" for e in outputs]
        take_slots = [
            line
            for e in outputs
            for line in (
                f"free[{e}] = free[{e}] - {edges[e].produce};",
                f"busy[{e}] = {edges[e].produce};",
            )
        ]
        take_tokens = [
            line
            for e in every
            for line in (
                f"ready[{e}] = ready[{e}] - {edges[e].consume};",
                f"held[{e}] = {edges[e].consume if e in inputs else 0};",
            )
        ]
        take_rest = [
            line
            for e in inputs
            for line in (
                f"held[{e}] = {least([f'ready[{e}]', str(edges[e].consume)])};",
                f"ready[{e}] = ready[{e}] - held[{e}];",
            )
        ]
        hand_back = [line for e in inputs for line in repeated(f"ready[{e}]", f"from{e}")]
        leave = (
            [f"state[{a}] = S_CLOSING;", f"flush_{a}();"]
            if self.table.is_flushed[a]
            else [f"finish_{a}();"]
        )
        waits = f"state[{a}] == S_WAITING"
        return [
            *inline(
                f"settle_{a}()",
                [*[f"ended[{e}]" for e in every], *is_home],
                [f"state[{a}] = S_ENDED;"],
            ),
            *block(
                f"inline finish_{a}()",
                [
                    *hand_back,
                    *[f"send_END_to{e}();" for e in outputs],
                    f"state[{a}] = S_DRAINING;",
                    f"settle_{a}();",
                ],
            ),
            *inline(
                f"flush_{a}()",
                ["!halted", *is_done, *has_slots],
                [
                    *take_rest,
                    *take_slots,
                    f"fired[{a}] = fired[{a}] + 1;",
                    f"state[{a}] = S_FLUSHING;",
                ],
            ),
            *inline(f"close_{a}()", [waits, "!halted", f"({any_(is_short)})"], leave),
            *inline(
                f"fire_{a}()",
                [waits, "!halted", *has_tokens, *has_slots],
                [
                    *take_tokens,
                    *take_slots,
                    f"fired[{a}] = fired[{a}] + 1;",
                    f"state[{a}] = S_FIRING;",
                ],
            ),
        ]

    def _reaction(self, reaction: Reaction, a: int, kind: Message, edge: int) -> list[str]:
        """What a reaction of actor `a` does; `edge` means nothing for the end of a firing."""
        inputs, outputs = self.table.inputs[a], self.table.outputs[a]
        fresh = [line for e in outputs for line in (f"busy[{e}] = 0;", f"send_READY_to{e}();")]
        note = [f"assert(!ended[{edge}]);", f"ended[{edge}] = 1;"]
        match reaction:
            case Reaction.COUNT:
                return [*self._count(kind, edge), f"fire_{a}();"]
            case Reaction.RETRY:
                return [*self._count(kind, edge), f"flush_{a}();"]
            case Reaction.SETTLE:
                return [*self._count(kind, edge), f"settle_{a}();"]
            case Reaction.NOTE_END:
                return note
            case Reaction.END_INPUT:
                return [*note, f"close_{a}();"]
            case Reaction.RETRY_END:
                return [*note, f"flush_{a}();"]
            case Reaction.SETTLE_END:
                return [*note, f"settle_{a}();"]
            case Reaction.HAND_BACK:
                is_admission = self.table.edges[edge].producer == OUTSIDE
                back = [f"send_RETURN_from{edge}();"] * self.table.edges[edge].produce
                return ["skip;"] if is_admission else back
            case Reaction.COMPLETE:
                frees = [ln for e in inputs for ln in (f"held[{e}] = 0;", f"send_FREE_from{e}();")]
                return [*fresh, *frees, f"state[{a}] = S_WAITING;", f"fire_{a}();", f"close_{a}();"]
            case Reaction.FINISH:
                returns = [line for e in inputs for line in repeated(f"held[{e}]", f"from{e}")]
                return [*fresh, *returns, f"finish_{a}();"]
            case Reaction.EXHAUST:
                return self._exhaust(a)
            case Reaction.FAIL:
                return [f"state[{a}] = S_FAILED;", "halted = 1;"]
            case Reaction.ILLEGAL:
                return ["assert(false);   /* illegal */"]

    def _count(self, kind: Message, index: int) -> list[str]:
        edge = self.table.edges[index]
        if kind is Message.READY:
            lines = [f"ready[{index}] = ready[{index}] + {edge.produce};"]
            bound = f"ready[{index}] <= {edge.num_slots}"
        else:
            count = 1 if kind is Message.RETURN else edge.consume
            lines = [f"free[{index}] = free[{index}] + {count};"]
            bound = f"free[{index}] <= {edge.num_slots}"
        return lines if edge.producer == OUTSIDE else [*lines, f"assert({bound});"]

    def _exhaust(self, a: int) -> list[str]:
        permits, edges = self.table.admission[a], self.table.edges
        back = [
            line
            for e in self.table.outputs[a]
            for line in (f"free[{e}] = free[{e}] + {edges[e].produce};", f"busy[{e}] = 0;")
        ]
        return [
            *back,
            f"fired[{a}] = fired[{a}] - 1;",
            f"due[{a}] = fired[{a}];",
            f"ready[{permits}] = 0;",
            f"ended[{permits}] = 1;",
            f"finish_{a}();",
        ]

    def _receive(self, a: int, kind: Message, edge: int = 0) -> list[str]:
        """Dispatch on the state, cell by cell of the table."""
        lines = ["if"]
        for before, (state, row) in enumerate(self.transitions.items()):
            cell = row[kind]
            after = any_([f"state[{a}] == S_{to.name}" for to in cell.to])
            lines += [
                f":: state[{a}] == S_{state.name} ->   /* {state.name} {kind.name}:"
                f" {cell.reaction.name} */",
                *indented(self._reaction(cell.reaction, a, kind, edge)),
                *indented(
                    [f"assert({after});", f"c_code {{ reach({before}, {kind}, now.state[{a}]); }};"]
                ),
            ]
        return [*lines, "fi;"]

    # -- the machine -------------------------------------------------------------------------------

    def _check(self) -> list[str]:
        terms = [
            f"assert(ready[{e}] + free[{e}] + held[{e}] + busy[{e}] + moving[{e}]"
            f" == {self.table.edges[e].num_slots});"
            for e in self.edges
        ]
        return block("inline check()", terms or ["skip;"])

    def _machine(self) -> list[str]:
        start = [
            line
            for e in self.edges
            for line in (
                f"ready[{e}] = {self.table.edges[e].initial};",
                f"free[{e}] = {self.table.edges[e].num_slots - self.table.edges[e].initial};",
            )
        ]
        start += [f"fire_{a}();" for a in self.actors]
        events = [line for option in self._events() for line in option]
        body = [
            *block("d_step", [*start, "check();"]),
            "do",
            *events,
            f":: {' && '.join([f'state[{a}] == S_ENDED' for a in self.actors])} -> break",
            f":: halted && {self._is_quiet()} -> break",
            "od;",
            "skip;",
            *block(
                "d_step",
                ["if", ":: halted -> skip", ":: else ->", *indented(self._end_checks()), "fi"],
            ),
        ]
        return block("active proctype machine()", body)

    def _events(self) -> Iterable[list[str]]:
        edges = self.table.edges
        for e in self.edges:
            edge = edges[e]
            ready = [f"moving[{e}] = moving[{e}] - {edge.produce};"]
            free = [f"moving[{e}] = moving[{e}] - {edge.consume};"]
            one = [f"moving[{e}] = moving[{e}] - 1;"]
            yield delivery(
                f"to{e}",
                {
                    Message.READY: [*ready, *self._receive(edge.consumer, Message.READY, e)],
                    Message.END: self._receive(edge.consumer, Message.END, e),
                },
            )
            yield delivery(
                f"from{e}",
                {
                    Message.FREE: [*free, *self._receive(edge.producer, Message.FREE, e)],
                    Message.RETURN: [*one, *self._receive(edge.producer, Message.RETURN, e)],
                },
            )
        for a in self.actors:
            runs = f"(state[{a}] == S_FIRING || state[{a}] == S_FLUSHING)"
            yield event(runs, self._receive(a, Message.DONE))
            if a in self.study.failing:
                yield event(runs, self._receive(a, Message.FAILED))
            if self.table.admission[a] is not None and self.study.is_exhausting:
                yield event(f"state[{a}] == S_FIRING", self._receive(a, Message.EXHAUSTED))
        for a, permits in enumerate(self.table.admission):
            if permits is not None:
                yield from self._commands(a, permits)

    def _commands(self, a: int, permits: int) -> Iterable[list[str]]:
        """Admit a source once more, or end its admission; neither reaches one that drains."""
        most = self.study.permits(a)
        is_open = f"!asked[{a}] && state[{a}] < S_DRAINING"
        yield event(
            f"{is_open} && due[{a}] < {most}",
            [f"due[{a}] = due[{a}] + 1;", *self._receive(a, Message.READY, permits)],
        )
        for limit in range(most if self.study.is_limited else 0):
            bound = f"(fired[{a}] > {limit} -> fired[{a}] : {limit})"
            cut = [
                f"due[{a}] = (due[{a}] < {bound} -> due[{a}] : {bound});",
                f"ready[{permits}] = due[{a}] - fired[{a}];",
            ]
            end = self._receive(a, Message.END, permits)
            yield event(f"{is_open} && due[{a}] > {limit}", [f"asked[{a}] = 1;", *cut, *end])
        yield event(is_open, [f"asked[{a}] = 1;", *self._receive(a, Message.END, permits)])

    def _is_quiet(self) -> str:
        empty = [f"empty({way}{e})" for e in self.edges for way in ("to", "from")]
        still = [f"state[{a}] != S_FIRING && state[{a}] != S_FLUSHING" for a in self.actors]
        return " && ".join([*empty, *still])

    def _end_checks(self) -> list[str]:
        edges = self.table.edges
        lines = [f"assert(free[{e}] == {edges[e].num_slots} && ended[{e}]);" for e in self.edges]
        for a in self.actors:
            if self.table.admission[a] is not None:
                lines.append(f"assert(fired[{a}] == due[{a}]);")
                continue
            full = [
                f"({edges[e].initial} + {edges[e].produce} * fired[{edges[e].producer}])"
                f" / {edges[e].consume}"
                for e in self.table.inputs[a]
            ]
            flushed = int(self.table.is_flushed[a])
            lines.append(f"assert(fired[{a}] == {least(full)} + {flushed});")
        return lines
