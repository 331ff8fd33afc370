"""What changes while a machine runs, in columns, and the few ways to change it.

By message: `level` and `refill` of the condition that it refills (see `actors.wiring`). By actor:
`state`, `unmet` conditions, `firings` that were started, `has_end` (an input has ended) and
`flush_tokens` of a last firing. By edge: `is_ended`. Then what the caller takes over (`outbox`,
`fireable`, `detached`, `flushing`) and the `ring` of the last messages.

The lists stay the same objects for as long as the machine lives: `Machine.deliver` has them in
locals while others change them.
"""

from __future__ import annotations

from collections import deque
from typing import NoReturn

from actors.errors import ProtocolError
from actors.story import addressee, describe, tell
from actors.table import MachineTable
from actors.transitions import KIND_MASK, NOBODY, Message, State
from actors.wiring import wire

_STORY_ROWS_PER_ACTOR = 16
_STORY_ROWS = 1000
_STORY_LIMIT = 12

_RETURN_TO_FREE = Message.RETURN ^ Message.FREE


class Columns:
    """The state of one run of an actor graph, as it is before the first message."""

    __slots__ = (
        "detached", "fireable", "firings", "flush_tokens", "flushing", "has_end", "is_ended",
        "is_halted", "level", "limit", "num_open", "outbox", "owner", "refill", "ring", "state",
        "table", "unmet", "wiring",
    )  # fmt: skip

    def __init__(self, table: MachineTable) -> None:
        num_actors = table.num_actors
        self.table = table
        self.wiring = wiring = wire(table)
        self.outbox: list[int] = []
        self.fireable: deque[int] = deque()
        self.detached: deque[int] = deque()
        self.flushing: deque[int] = deque()
        self.ring: deque[int] = deque(maxlen=_STORY_ROWS_PER_ACTOR * num_actors + _STORY_ROWS)
        self.owner, self.limit = wiring.owner, wiring.limit
        self.refill, self.level = list(wiring.refill), list(wiring.level)
        # One entry more than actors: the addressee of messages to nobody.
        self.state = [int(State.WAITING)] * num_actors + [NOBODY]
        self.unmet = list(wiring.num_unmet)
        self.firings = [0] * num_actors
        self.has_end = [False] * num_actors
        self.is_ended = [False] * len(table.edges)
        self.flush_tokens: list[tuple[int, ...]] = [()] * num_actors
        self.num_open = num_actors
        self.is_halted = False

    def add(self, code: int, count: int) -> None:
        """Refill the condition of a message by so many. Raises ProtocolError above its limit."""
        level = self.level[code] + count
        if level > self.limit[code]:
            self.refuse(code)
        self.unmet[self.owner[code]] -= level - count < 0 <= level
        self.level[code] = level

    def take(self, code: int, count: int) -> None:
        """Take so many from the condition of a message."""
        level = self.level[code] - count
        self.unmet[self.owner[code]] += level < 0 <= level + count
        self.level[code] = level

    def count(self, code: int) -> None:
        """Add what a Ready, Free or Return brings, and note it."""
        if code & KIND_MASK == Message.RETURN:
            free = code ^ _RETURN_TO_FREE
            self.add(free, 1)
            # Where slots come one by one, a whole Free can cross zero and its limit at once, which
            # `deliver` does not look for: from now on the table decides, and `add` looks.
            self.refill[free] = 0
        else:
            self.add(code, self.wiring.refill[code])
        self.ring.append(code)

    def look_up_every_message(self, actor: int) -> None:
        """Have the table decide about every message to an actor from now on.

        While an actor waits or fires, its Ready and Free are COUNT, whatever its state; so their
        cells are not looked up, which saves a tenth of a firing. A refill of 0 ends that.
        """
        for code, _ in self.wiring.takes[actor]:
            self.refill[code] = 0

    def halt(self) -> None:
        """Make being halted an unmet condition of every actor; once."""
        if not self.is_halted:
            self.is_halted = True
            self.unmet[:] = [unmet + 1 for unmet in self.unmet]

    def story(self, actor: int) -> tuple[str, ...]:
        """Return what last happened to an actor and its neighbours: see `Machine.story`."""
        return tell(self.table, self.ring, actor, _STORY_LIMIT)

    def refuse(self, code: int) -> NoReturn:
        """Raise the ProtocolError about a message that is not allowed now."""
        actor = addressee(self.table, code)
        if actor is None:
            raise ProtocolError(f"message {code} names no edge or actor of this plan")
        raise ProtocolError(
            f"{describe(self.table, code)} is not allowed now: actor {self.table.names[actor]!r} is"
            f" {State(self.state[actor]).name} in firing {self.firings[actor] - 1}."
            " Its last messages:" + "".join([f"\n  {row}" for row in self.story(actor)])
        )
