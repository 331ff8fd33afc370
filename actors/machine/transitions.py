"""The actor's states, the messages, and the complete transition table between them, as data.

A message is a plain int: its kind in the three low bits, the edge or the actor above them. So a
mailbox is a queue of ints, no object is built per firing, and `state | kind` is the index of a cell
of the table. The table is the documentation: `transition_table()` prints it, the machine obeys it,
and a cell that is empty is a ProtocolError.

Source: actors and messages of the actor model (Hewitt, Bishop, Steiger 1973); credits as in
OneFlow's actor runtime (Yuan et al. 2021), with End and Failed added so that a run can finish or
fail cleanly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from types import MappingProxyType

# Seven kinds fit in three bits; the eighth value is illegal in every state.
KIND_BITS = 3
KIND_MASK = (1 << KIND_BITS) - 1


class Message(IntEnum):
    """Kinds of message. READY, FREE, RETURN and END name an edge, the others an actor."""

    READY = 0
    """The producer has filled one firing's worth of slots (its rate)."""
    FREE = 1
    """The consumer is done with one firing's worth of slots (its rate)."""
    RETURN = 2
    """One slot comes back from a consumer that will not fire in full again."""
    END = 3
    """No READY follows on this edge."""
    DONE = 4
    """The firing of this actor is complete."""
    FAILED = 5
    """The firing of this actor raised."""
    EXHAUSTED = 6
    """The firing of this source found no more data and produced nothing."""


class State(IntEnum):
    """What an actor is doing. The value is the first index of its row in `REACTIONS`."""

    WAITING = 0 << KIND_BITS
    """Some token or free slot is missing."""
    FIRING = 1 << KIND_BITS
    """A firing runs; its tokens and slots are taken."""
    CLOSING = 2 << KIND_BITS
    """A flushed actor whose input has ended waits for what its last firing needs."""
    FLUSHING = 3 << KIND_BITS
    """The last firing of a flushed actor runs."""
    DRAINING = 4 << KIND_BITS
    """Fires no more; waits until its slots are home and every input has ended."""
    ENDED = 5 << KIND_BITS
    """Nothing is left to do."""
    FAILED = 6 << KIND_BITS
    """A firing raised; what it had taken stays taken."""


class Reaction(Enum):
    """What the machine does with a message. The value says it to the reader of the table."""

    COUNT = "count; fire if nothing is missing"
    COMPLETE = "send Ready and Free; fire again, close, or wait"
    NOTE_END = "note the end"
    END_INPUT = "note the end; close if the edge has too few tokens"
    RETRY = "count; flush if possible"
    RETRY_END = "note the end; flush if possible"
    FINISH = "send Ready, Return and End"
    HAND_BACK = "return the slots"
    SETTLE = "count; end if all slots are returned"
    SETTLE_END = "note the end; end if all slots are returned"
    EXHAUST = "release the slots; send Free and End"
    FAIL = "halt the machine"
    ILLEGAL = ""


@dataclass(frozen=True, slots=True)
class Transition:
    """One cell: the reaction, and the states in which it can leave the actor."""

    reaction: Reaction
    to: tuple[State, ...]


def _row(state: State, **cells: tuple[Reaction, tuple[State, ...]]) -> dict[Message, Transition]:
    row = {kind: Transition(Reaction.ILLEGAL, (state,)) for kind in Message}
    row.update({Message[name]: Transition(*cell) for name, cell in cells.items()})
    return row


_S, _R = State, Reaction
_STARTED = (_R.COUNT, (_S.WAITING, _S.FIRING))
_FLUSHED = (_R.RETRY, (_S.CLOSING, _S.FLUSHING))
_AT_HOME = (_R.SETTLE, (_S.DRAINING, _S.ENDED))

TRANSITIONS: Mapping[State, Mapping[Message, Transition]] = MappingProxyType(
    {
        _S.WAITING: _row(
            _S.WAITING,
            READY=_STARTED,
            FREE=_STARTED,
            RETURN=_STARTED,
            END=(_R.END_INPUT, (_S.WAITING, _S.CLOSING, _S.FLUSHING, _S.DRAINING, _S.ENDED)),
        ),
        _S.FIRING: _row(
            _S.FIRING,
            READY=(_R.COUNT, (_S.FIRING,)),
            FREE=(_R.COUNT, (_S.FIRING,)),
            RETURN=(_R.COUNT, (_S.FIRING,)),
            # Only noted: the running firing may be followed by others, if enough tokens are there.
            END=(_R.NOTE_END, (_S.FIRING,)),
            DONE=(
                _R.COMPLETE,
                (_S.WAITING, _S.FIRING, _S.CLOSING, _S.FLUSHING, _S.DRAINING, _S.ENDED),
            ),
            FAILED=(_R.FAIL, (_S.FAILED,)),
            EXHAUSTED=(_R.EXHAUST, (_S.DRAINING, _S.ENDED)),
        ),
        _S.CLOSING: _row(
            _S.CLOSING,
            READY=_FLUSHED,
            FREE=_FLUSHED,
            RETURN=_FLUSHED,
            END=(_R.RETRY_END, (_S.CLOSING, _S.FLUSHING)),
        ),
        _S.FLUSHING: _row(
            _S.FLUSHING,
            # Too late for the last firing; counted, so that `finish` hands the tokens back.
            READY=(_R.COUNT, (_S.FLUSHING,)),
            FREE=(_R.COUNT, (_S.FLUSHING,)),
            RETURN=(_R.COUNT, (_S.FLUSHING,)),
            END=(_R.NOTE_END, (_S.FLUSHING,)),
            DONE=(_R.FINISH, (_S.DRAINING, _S.ENDED)),
            FAILED=(_R.FAIL, (_S.FAILED,)),
        ),
        _S.DRAINING: _row(
            _S.DRAINING,
            # An input that has not ended goes on sending; its producer needs the slots to end.
            READY=(_R.HAND_BACK, (_S.DRAINING,)),
            FREE=_AT_HOME,
            RETURN=_AT_HOME,
            END=(_R.SETTLE_END, (_S.DRAINING, _S.ENDED)),
        ),
        # All slots are home and every input has ended, so nobody is left who could send anything.
        _S.ENDED: _row(_S.ENDED),
        _S.FAILED: _row(
            _S.FAILED,
            # Neighbours that were firing may still finish; their messages are counted, and start
            # nothing.
            READY=(_R.COUNT, (_S.FAILED,)),
            FREE=(_R.COUNT, (_S.FAILED,)),
            RETURN=(_R.COUNT, (_S.FAILED,)),
            END=(_R.NOTE_END, (_S.FAILED,)),
        ),
    }
)
"""What each message does in each state."""

Change = tuple[State, Message, State]
"""The state of an actor before a message, the message, and the state after."""

CHANGES: tuple[Change, ...] = tuple(
    [
        (state, kind, after)
        for state, row in TRANSITIONS.items()
        for kind, transition in row.items()
        if transition.reaction is not Reaction.ILLEGAL
        for after in transition.to
    ]
)
"""Every change of state that the table allows."""

REACTION_CODES: Mapping[Reaction, int] = MappingProxyType({r: i for i, r in enumerate(Reaction)})
"""Dense codes: the machine compares ints, because comparing enum members costs 30 ns more."""

NOBODY = len(State) << KIND_BITS
"""The state of an addressee that does not exist: every message to it is illegal."""

REACTIONS: tuple[int, ...] = tuple(
    [
        REACTION_CODES[TRANSITIONS[state][Message(kind)].reaction]
        if kind in Message._value2member_map_
        else REACTION_CODES[Reaction.ILLEGAL]
        for state in State
        for kind in range(1 << KIND_BITS)
    ]
    # The row of NOBODY.
    + [REACTION_CODES[Reaction.ILLEGAL]] * (1 << KIND_BITS)
)
"""The table flattened: the reaction's code at index `state | kind`."""


def message(kind: Message, subject: int) -> int:
    """Return the int for a message about an edge or an actor."""
    return subject << KIND_BITS | kind


def kind_of(code: int) -> Message:
    """Return the kind of a message. Raises ValueError for an unknown one."""
    return Message(code & KIND_MASK)


def subject_of(code: int) -> int:
    """Return the edge or actor that a message is about."""
    return code >> KIND_BITS


def transition_table() -> str:
    """Return the transition table as Markdown, one row per state, one column per message."""
    lines = [
        "| state | " + " | ".join(kind.name for kind in Message) + " |",
        "|---" * (len(Message) + 1) + "|",
    ]
    for state, row in TRANSITIONS.items():
        cells = [
            f"{t.reaction.value} → {', '.join(s.name for s in t.to)}"
            if t.reaction is not Reaction.ILLEGAL
            else "-"
            for t in row.values()
        ]
        lines.append(f"| {state.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def state_diagram() -> str:
    """Return the states as a Mermaid diagram; an arrow names the messages that can take it.

    What a message leaves where it is has no arrow: the table has it.
    """
    lines = ["stateDiagram-v2", f"    [*] --> {State.WAITING.name}"]
    for state, row in TRANSITIONS.items():
        for to in State:
            kinds = [kind.name for kind, cell in row.items() if to in cell.to]
            if kinds and to is not state:
                lines.append(f"    {state.name} --> {to.name}: {', '.join(kinds)}")
    lines += [f"    {state.name} --> [*]" for state in (State.ENDED, State.FAILED)]
    return "\n".join(lines) + "\n"
