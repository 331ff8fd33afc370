"""The actor machine: messages in, firings and messages out; no thread, clock, device or array.

**The rule.** An actor fires when every input edge holds enough ready tokens and every output edge
enough free slots. It takes them when it starts; when it is done it sends Ready to its consumers and
Free to its producers. Pipelining, double buffering and back-pressure all follow from this one rule
and the number of slots. Firings of one actor are never concurrent, and start in order; so firing k
works on the slots that follow those of firing k-1, and slots need no bookkeeping beyond counters.

**Why it is fast.** Either end of an edge is a *condition* with one counter, its level: what is
there less what a firing takes. A level of 0 or more is a met condition, and an actor counts its
unmet ones (OneFlow's light actor: Yuan et al. 2021), so that a message costs an addition and two
comparisons, however many edges the actor has. That the actor does not wait, and that the machine is
halted, count as unmet conditions too: so an actor fires exactly when its count reaches 0, and no
other test is made. Conditions are numbered by the message that refills them; messages of an actor
are computed once; nothing is built per firing.

**How a run ends.** Admission ends at the sources, End follows the last token on every edge. An
actor whose ended input holds less than a firing needs cannot fire in full again: a flushed actor
fires once more with what is left, any other hands the rest back. Then it passes End on and waits
until its slots are home. A failed firing halts the machine: what runs may finish, nothing starts.

Messages may arrive in any order across edges, but in order on each edge. All pass through
`deliver`, and the table in `actors.transitions` decides; a message that it does not allow changes
nothing and raises.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from itertools import chain
from typing import NoReturn

from actors.errors import ProtocolError
from actors.invariants import check_actors, check_edges
from actors.story import addressee, causes, describe, missing, tell, tell_all
from actors.table import MachineTable
from actors.transitions import (
    KIND_MASK,
    NOBODY,
    REACTION_CODES,
    REACTIONS,
    Message,
    Reaction,
    State,
    message,
    subject_of,
)
from actors.wiring import wire

_STORY_ROWS_PER_ACTOR = 16
_STORY_ROWS = 1000
_STORY_LIMIT = 12

_RETURN_TO_FREE = Message.RETURN ^ Message.FREE
_WAITING, _FIRING, _CLOSING = int(State.WAITING), int(State.FIRING), int(State.CLOSING)
_FLUSHING, _DRAINING, _ENDED = int(State.FLUSHING), int(State.DRAINING), int(State.ENDED)
_FAILED, _OVER = int(State.FAILED), (_DRAINING, _ENDED)
_COUNT, _COMPLETE = REACTION_CODES[Reaction.COUNT], REACTION_CODES[Reaction.COMPLETE]


class Machine:
    """The state of one run of an actor graph.

    `outbox` holds messages to deliver. `fireable` names the actors that have started a firing and
    must be run, in order; `detached` likewise those with a thread of their own; `flushing` those of
    either sort that start their last, flushed firing. The caller takes from all, runs what was
    started, and reports each firing with one message: DONE, FAILED or EXHAUSTED. An actor that has
    all it needs in initial tokens starts when the machine is made.

    `num_open` actors have not ended; `is_halted` says that one failed, or that `halt` was called.
    `start_causes[code]` counts the firings that message `code` started: it brought the last thing
    missing. It serves statistics (see `causes`); nothing else reads it.
    """

    __slots__ = (
        "_firings", "_flush_tokens", "_has_end", "_is_ended", "_level", "_limit",
        "_note", "_owner", "_posts", "_refill", "_ring", "_send", "_slow", "_start_in",
        "_state", "_takes", "_unmet", "_wiring", "detached", "fireable", "flushing", "is_halted",
        "num_open", "outbox", "start_causes", "table",
    )  # fmt: skip

    def __init__(self, table: MachineTable) -> None:
        wiring = wire(table)
        num_actors = table.num_actors
        self.table = table
        self.outbox: list[int] = []
        self.fireable: deque[int] = deque()
        self.detached: deque[int] = deque()
        self.flushing: deque[int] = deque()
        self._ring: deque[int] = deque(maxlen=_STORY_ROWS_PER_ACTOR * num_actors + _STORY_ROWS)
        self._start_in = [
            self.detached.append if is_detached else self.fireable.append
            for is_detached in table.is_detached
        ]
        self._note = self._ring.append
        self._send = self.outbox.extend
        self._wiring = wiring
        self._owner = wiring.owner
        self._refill = list(wiring.refill)
        self._limit = wiring.limit
        self._takes = wiring.takes
        self._posts = wiring.posts
        self._level = list(wiring.level)
        # One entry more than actors: the addressee of messages to nobody.
        self._state = [_WAITING] * num_actors + [NOBODY]
        self._unmet = list(wiring.num_unmet)
        self._firings = [0] * num_actors
        self._has_end = [False] * num_actors
        self._is_ended = [False] * len(table.edges)
        self._flush_tokens: list[tuple[int, ...]] = [()] * num_actors
        self.num_open = num_actors
        self.is_halted = False
        self.start_causes = [0] * len(self._level)
        self._slow = {
            REACTION_CODES[Reaction.ILLEGAL]: self._reject,
            REACTION_CODES[Reaction.NOTE_END]: self._note_end,
            REACTION_CODES[Reaction.END_INPUT]: self._end_input,
            REACTION_CODES[Reaction.RETRY]: self._retry,
            REACTION_CODES[Reaction.RETRY_END]: self._retry_end,
            REACTION_CODES[Reaction.FINISH]: self._finish_flush,
            REACTION_CODES[Reaction.HAND_BACK]: self._hand_back,
            REACTION_CODES[Reaction.SETTLE]: self._settle_slot,
            REACTION_CODES[Reaction.SETTLE_END]: self._settle_end,
            REACTION_CODES[Reaction.EXHAUST]: self._exhaust,
            REACTION_CODES[Reaction.FAIL]: self._fail,
        }
        for actor in [a for a, unmet in enumerate(wiring.num_unmet) if not unmet]:
            self._start(actor)

    # -- what the caller may ask for -------------------------------------------------------------

    def admit(self, actor: int, count: int) -> None:
        """Permit `count` more firings of a source; no effect on a source that has no more data.

        Raises ProtocolError when the actor is no source or its admission was ended.
        """
        edge = self._admission(actor)
        if self._state[actor] >= _DRAINING:
            return
        if self._is_ended[edge] or count < 1:
            raise ProtocolError(
                f"source {self.table.names[actor]!r} was admitted to {count} firings; expected one"
                " or more, before admission ends"
            )
        self.receive(message(Message.READY, edge))
        self._add(message(Message.READY, edge), count - 1)

    def end_admission(self, actor: int, limit: int | None = None) -> None:
        """Permit a source no more than what is admitted, and no more than `limit` firings in all.

        A second call can only lower the limit. Raises ProtocolError when the actor is no source.
        """
        edge = self._admission(actor)
        if limit is not None:
            code = message(Message.READY, edge)
            surplus = self._level[code] + 1 - max(0, limit - self._firings[actor])
            self._take(code, max(0, surplus))
        if not self._is_ended[edge]:
            self.receive(message(Message.END, edge))
        elif self._state[actor] == _WAITING:
            self._close(actor)

    def halt(self) -> None:
        """Start nothing more. What runs may finish, and messages may still be delivered."""
        if not self.is_halted:
            self.is_halted = True
            # In place: `deliver`, which may be under way, has the list.
            self._unmet[:] = [unmet + 1 for unmet in self._unmet]

    @property
    def is_finished(self) -> bool:
        """Whether every actor has ended and every slot is home."""
        return not self.num_open

    @property
    def is_quiescent(self) -> bool:
        """Whether nothing runs and nothing is left to deliver. Linear in actors."""
        return not self.outbox and not any(s in (_FIRING, _FLUSHING) for s in self._state)

    def state(self, actor: int) -> State:
        """Return the state of an actor."""
        return State(self._state[actor])

    def firing_index(self, actor: int) -> int:
        """Return the index of the running or else the last firing; -1 before the first."""
        return self._firings[actor] - 1

    def flush_tokens(self, actor: int) -> tuple[int, ...]:
        """Return how many tokens the last firing of a flushed actor took, per input port."""
        return self._flush_tokens[actor]

    def story(self, actor: int) -> tuple[str, ...]:
        """Return what last happened to an actor and its neighbours in words, oldest first.

        Ready and Free of ordinary life are left out: they follow from the neighbours' DONE.
        """
        return tell(self.table, self._ring, actor, _STORY_LIMIT)

    def last_messages(self, limit: int) -> tuple[str, ...]:
        """Return the last messages of all actors in words, at most `limit`, oldest first.

        At least 1,000 are known. The Ready and Free of ordinary life are told with the DONE that
        sends them. Any thread may ask.
        """
        state, codes = self._state, tuple(self._ring)
        flushed = [a for a, t in enumerate(self._flush_tokens) if t and state[a] in _OVER]
        return tell_all(self.table, self._posts, flushed, codes, limit)

    def causes(self, actor: int) -> tuple[tuple[str, str, int], ...]:
        """Return how many firings each thing started that came last: see `actors.story.causes`."""
        return causes(self.table, self.start_causes, actor)

    def waits_for(self, actor: int) -> tuple[str, ...]:
        """Return what an actor lacks for its next firing, in words."""
        return missing(self.table, self._takes[actor], self._level)

    def lacks(self, actor: int) -> tuple[int, ...]:
        """Return the messages that an actor waits for before it can fire again, or end.

        READY and FREE stand for a token and a slot that is missing, END for the end of an input.
        """
        ends = [message(Message.END, e) for e in self.table.all_inputs(actor)]
        ends = [code for code in ends if not self._is_ended[subject_of(code)]]
        free = [message(Message.FREE, e) for e in self.table.outputs[actor]]
        if self._state[actor] == _DRAINING:
            return (*ends, *[code for code in free if self._level[code] < self._limit[code]])
        ready = [code ^ Message.END ^ Message.READY for code in ends]
        return tuple([code for code in (*ready, *free) if self._level[code] < 0])

    def stall(self) -> str:
        """Return who waits for what, for the error about a run that cannot go on."""
        open_ = [a for a in range(self.table.num_actors) if self._state[a] != _ENDED]
        waits = [", ".join(self.waits_for(a)) or "the end of its firing" for a in open_]
        names = [self.table.names[a] for a in open_]
        return "; ".join([f"{n!r} waits for {w}" for n, w in zip(names, waits, strict=True)])

    def receive(self, code: int) -> None:
        """Take one message.

        Raises ProtocolError when the table does not allow the message now; nothing is changed then.
        """
        self.deliver((code,))

    def deliver(self, codes: Iterable[int]) -> None:
        """Take messages in order: the one place that changes the state of an actor.

        Given the outbox, it also takes what is sent meanwhile; the caller clears the outbox then.
        So all that the end of a firing leads to costs one call.

        Raises ProtocolError at the first message that the table does not allow now; that one
        changes nothing, and those after it are not looked at.
        """
        refills, levels, unmets, states = self._refill, self._level, self._unmet, self._state
        limits, owners, takes, causes = self._limit, self._owner, self._takes, self.start_causes
        for code in codes:
            try:
                refill = refills[code]
            except IndexError:
                self._refuse(code)
            if refill:
                # The table's cell is COUNT, looked up in advance: see `_look_up_every_message`.
                level = levels[code] + refill
                if level >= refill:
                    # The condition was met before: nothing new can fire. Only here can a slot be
                    # one too many, because a level that crosses zero is below its limit while slots
                    # come and go by whole firings: see `_count`.
                    if level > limits[code]:
                        self._refuse(code)
                    levels[code] = level
                    continue
                levels[code] = level
                if level < 0:
                    continue
                actor = owners[code]
                unmet = unmets[actor] - 1
                if unmet:
                    unmets[actor] = unmet
                    continue
            else:
                actor = owners[code]
                reaction = REACTIONS[states[actor] | code & KIND_MASK]
                if reaction == _COMPLETE:
                    self._note(code)
                    self._send(self._posts[actor])
                    states[actor] = _WAITING
                    unmet = unmets[actor] - 1
                    if unmet:
                        unmets[actor] = unmet
                        if self._has_end[actor]:
                            self._close(actor)
                        continue
                elif reaction == _COUNT:
                    self._count(code)
                    if unmets[actor]:
                        continue
                else:
                    self._slow[reaction](actor, code)
                    continue
            # Nothing is missing: start a firing as in `_start`, without a call.
            causes[code] += 1
            unmet = 1
            for condition, count in takes[actor]:
                level = levels[condition] - count
                levels[condition] = level
                if level < 0:
                    unmet += 1
            unmets[actor] = unmet
            states[actor] = _FIRING
            self._firings[actor] += 1
            self._start_in[actor](actor)

    # -- off the hot path ------------------------------------------------------------------------

    def _start(self, actor: int) -> None:
        """Start a firing: take its tokens and slots."""
        for code, count in self._takes[actor]:
            self._take(code, count)
        self._unmet[actor] += 1
        self._state[actor] = _FIRING
        self._firings[actor] += 1
        self._start_in[actor](actor)

    def _count(self, code: int) -> None:
        if code & KIND_MASK == Message.RETURN:
            free = code ^ _RETURN_TO_FREE
            self._add(free, 1)
            # Where slots come one by one, a whole Free can cross zero and its limit at once, which
            # `receive` does not look for: from now on the table decides, and `_add` looks.
            self._refill[free] = 0
        else:
            self._add(code, self._wiring.refill[code])
        self._note(code)

    def _add(self, code: int, count: int) -> None:
        level = self._level[code] + count
        if level > self._limit[code]:
            self._refuse(code)
        self._unmet[self._owner[code]] -= level - count < 0 <= level
        self._level[code] = level

    def _take(self, code: int, count: int) -> None:
        level = self._level[code] - count
        self._unmet[self._owner[code]] += level < 0 <= level + count
        self._level[code] = level

    def _admission(self, actor: int) -> int:
        edge = self.table.admission[actor] if 0 <= actor < self.table.num_actors else None
        if edge is None:
            raise ProtocolError(f"actor {actor} is no source without inputs: it is not admitted")
        return edge

    def _reject(self, actor: int, code: int) -> None:
        self._refuse(code)

    def _refuse(self, code: int) -> NoReturn:
        actor = addressee(self.table, code)
        if actor is None:
            raise ProtocolError(f"message {code} names no edge or actor of this plan")
        raise ProtocolError(
            f"{describe(self.table, code)} is not allowed now: actor {self.table.names[actor]!r} is"
            f" {self.state(actor).name} in firing {self.firing_index(actor)}. Its last messages:"
            + "".join([f"\n  {row}" for row in self.story(actor)])
        )

    # -- the way to the end ----------------------------------------------------------------------

    def _note_end(self, actor: int, code: int) -> None:
        edge = subject_of(code)
        if self._is_ended[edge]:
            self._refuse(code)
        self._is_ended[edge] = self._has_end[actor] = True
        self._note(code)

    def _end_input(self, actor: int, code: int) -> None:
        self._note_end(actor, code)
        self._close(actor)

    def _close(self, actor: int) -> None:
        """Leave the ordinary life if an ended input holds less than a firing needs."""
        if self.is_halted or not any(
            self._is_ended[e] and self._level[message(Message.READY, e)] < 0
            for e in self.table.all_inputs(actor)
        ):
            return
        self._unmet[actor] += 1
        self._look_up_every_message(actor)
        if self.table.is_flushed[actor]:
            self._state[actor] = _CLOSING
            self._flush(actor)
        else:
            self._finish(actor)

    def _look_up_every_message(self, actor: int) -> None:
        """Have the table decide about every message from now on.

        While an actor waits or fires, its Ready and Free are COUNT, whatever its state; so their
        cells are not looked up, which saves a tenth of a firing. A refill of 0 ends that.
        """
        for code, _ in self._takes[actor]:
            self._refill[code] = 0

    def _retry(self, actor: int, code: int) -> None:
        self._count(code)
        self._flush(actor)

    def _retry_end(self, actor: int, code: int) -> None:
        self._note_end(actor, code)
        self._flush(actor)

    def _flush(self, actor: int) -> None:
        """Start the last firing once its outputs are free and no input can still bring it tokens.

        Waiting for every input makes the number of tokens flushed independent of the order of
        messages.
        """
        levels, edges = self._level, self.table.edges
        codes = [message(Message.READY, e) for e in self.table.inputs[actor]]
        if (
            self.is_halted
            or any(levels[c] < 0 and not self._is_ended[subject_of(c)] for c in codes)
            or any(levels[message(Message.FREE, e)] < 0 for e in self.table.outputs[actor])
        ):
            return
        rates = [edges[subject_of(c)].consume for c in codes]
        tokens = [r + min(levels[c], 0) for c, r in zip(codes, rates, strict=True)]
        for code, count in zip(codes, tokens, strict=True):
            self._take(code, count)
        for edge in self.table.outputs[actor]:
            self._take(message(Message.FREE, edge), edges[edge].produce)
        self._flush_tokens[actor] = tuple(tokens)
        self._state[actor] = _FLUSHING
        self._firings[actor] += 1
        self.flushing.append(actor)

    def _finish_flush(self, actor: int, code: int) -> None:
        self._note(code)
        self._send(self._wiring.readies[actor])
        for edge, count in zip(self.table.inputs[actor], self._flush_tokens[actor], strict=True):
            self._send([message(Message.RETURN, edge)] * count)
        self._finish(actor)

    def _exhaust(self, actor: int, code: int) -> None:
        self._note(code)
        self._firings[actor] -= 1
        for edge in self.table.outputs[actor]:
            self._add(message(Message.FREE, edge), self.table.edges[edge].produce)
        admission = self._admission(actor)
        self._look_up_every_message(actor)
        permits = message(Message.READY, admission)
        self._take(permits, self._level[permits] + 1)
        self._is_ended[admission] = True
        self._finish(actor)

    def _finish(self, actor: int) -> None:
        """Hand back the tokens that no firing will read, pass End on, and wait for the slots."""
        for edge in self.table.inputs[actor]:
            code = message(Message.READY, edge)
            left = self._level[code] + self.table.edges[edge].consume
            self._take(code, left)
            self._send([message(Message.RETURN, edge)] * left)
        self._send([message(Message.END, e) for e in self.table.outputs[actor]])
        self._state[actor] = _DRAINING
        self._end_if_home(actor)

    def _hand_back(self, actor: int, code: int) -> None:
        self._note(code)
        self._send([code ^ Message.READY ^ Message.RETURN] * self._wiring.refill[code])

    def _settle_slot(self, actor: int, code: int) -> None:
        self._count(code)
        self._end_if_home(actor)

    def _settle_end(self, actor: int, code: int) -> None:
        self._note_end(actor, code)
        self._end_if_home(actor)

    def _end_if_home(self, actor: int) -> None:
        homes = [message(Message.FREE, e) for e in self.table.outputs[actor]]
        if all(self._is_ended[e] for e in self.table.all_inputs(actor)) and all(
            self._level[code] == self._limit[code] for code in homes
        ):
            self._state[actor] = _ENDED
            self.num_open -= 1

    def _fail(self, actor: int, code: int) -> None:
        self._note(code)
        self._state[actor] = _FAILED
        self.halt()

    # -- invariants ------------------------------------------------------------------------------

    def validate(self, in_transit: Iterable[int] = ()) -> None:
        """Check every invariant, in time linear in edges, actors and messages.

        `in_transit` are messages taken from the outbox and not yet received. Raises InternalError
        naming the edge or actor that does not add up.
        """
        moving = Counter(chain(self.outbox, in_transit))
        check_edges(self.table, self._level, self._state, self._flush_tokens, moving)
        check_actors(
            self.table, self._level, self._state, self._unmet, self.num_open, self.is_halted
        )
