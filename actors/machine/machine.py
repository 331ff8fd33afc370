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
`deliver`, and the table in `actors.machine.transitions` decides; a message that it does not allow
changes nothing and raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain

from actors.machine.columns import (
    MachineState,
    causes,
    check_actors,
    check_edges,
    describe_missing,
    message_history,
)
from actors.machine.errors import ProtocolError
from actors.machine.table import MachineTable
from actors.machine.transitions import (
    KIND_MASK,
    REACTION_CODES,
    REACTIONS,
    Message,
    Reaction,
    State,
    message,
    subject_of,
)

# How an actor ends: `Ending` reacts to every message that is not ordinary life. An actor of which
# an ended input holds less than a firing needs *closes*: a flushed one fires once more with what is
# left (`flush`), any other hands the rest back (`finish`). Then it *drains*: it waits until its
# slots are home and every input has ended.

_CLOSING, _FLUSHING = int(State.CLOSING), int(State.FLUSHING)
_DRAINING, _ENDED = int(State.DRAINING), int(State.ENDED)


class Ending:
    """The reactions that lead to an end, on the columns of a machine.

    `send` takes messages to deliver, in order. A faulty one replaces a method, as
    `Machine.ending_type`: see `actors.testing`.
    """

    __slots__ = ("columns", "send")

    def __init__(self, columns: MachineState) -> None:
        self.columns = columns
        self.send: Callable[[Iterable[int]], object] = columns.outbox.extend

    def reactions(self) -> Mapping[Reaction, Callable[[int, int], object]]:
        """Return what to call with the actor and the message, by reaction."""
        return {
            Reaction.NOTE_END: self.note_end,
            Reaction.END_INPUT: self.end_input,
            Reaction.RETRY: self.retry,
            Reaction.RETRY_END: self.retry_end,
            Reaction.FINISH: self.finish_flush,
            Reaction.HAND_BACK: self.hand_back,
            Reaction.SETTLE: self.settle_slot,
            Reaction.SETTLE_END: self.settle_end,
            Reaction.EXHAUST: self.exhaust,
        }

    def close(self, actor: int) -> None:
        """Leave the ordinary life if an ended input holds less than a firing needs."""
        columns = self.columns
        if columns.is_halted or not any(
            columns.is_ended[e] and columns.level[message(Message.READY, e)] < 0
            for e in columns.table.all_inputs(actor)
        ):
            return
        # No longer WAITING counts as one unmet condition, as in `check_actors`: no ordinary firing
        # starts now.
        columns.unmet[actor] += 1
        columns.look_up_every_message(actor)
        if columns.table.is_flushed[actor]:
            columns.state[actor] = _CLOSING
            self.flush(actor)
        else:
            self.finish(actor)

    def note_end(self, actor: int, code: int) -> None:
        """Note that an input has ended."""
        columns, edge = self.columns, subject_of(code)
        # An edge carries one End; a second one is a fault of its sender.
        if columns.is_ended[edge]:
            columns.refuse(code)
        columns.is_ended[edge] = columns.has_end[actor] = True
        columns.ring.append(code)

    def end_input(self, actor: int, code: int) -> None:
        """Note the end of an input, and close if that is too little for a firing."""
        self.note_end(actor, code)
        self.close(actor)

    def retry(self, actor: int, code: int) -> None:
        """Count a slot or a token, and flush if nothing else is missing."""
        self.columns.count(code)
        self.flush(actor)

    def retry_end(self, actor: int, code: int) -> None:
        """Note the end of an input, and flush if nothing else is missing."""
        self.note_end(actor, code)
        self.flush(actor)

    def flush(self, actor: int) -> None:
        """Start the last firing once its outputs are free and no input can still bring it tokens.

        Waiting for every input makes the number of tokens flushed independent of the order of
        messages.
        """
        columns, table = self.columns, self.columns.table
        levels, edges = columns.level, table.edges
        codes = [message(Message.READY, e) for e in table.inputs[actor]]
        if (
            columns.is_halted
            or any(levels[c] < 0 and not columns.is_ended[subject_of(c)] for c in codes)
            or any(levels[message(Message.FREE, e)] < 0 for e in table.outputs[actor])
        ):
            return
        # A level is what is there less the rate: below 0 it says how far this firing falls short.
        rates = [edges[subject_of(c)].consume for c in codes]
        tokens = [r + min(levels[c], 0) for c, r in zip(codes, rates, strict=True)]
        for code, count in zip(codes, tokens, strict=True):
            columns.take(code, count)
        for edge in table.outputs[actor]:
            # Outputs are filled in full: consumers count whole firings of their producer.
            columns.take(message(Message.FREE, edge), edges[edge].produce)
        columns.flush_tokens[actor] = tuple(tokens)
        columns.state[actor] = _FLUSHING
        columns.firings[actor] += 1
        columns.flushing.append(actor)

    def finish_flush(self, actor: int, code: int) -> None:
        """Pass the last firing on, hand back what it took, and finish."""
        columns = self.columns
        columns.ring.append(code)
        self.send(columns.wiring.readies[actor])
        # Not Free, which stands for a full rate: each token that was taken goes home as one Return.
        flushed = columns.flush_tokens[actor]
        for edge, count in zip(columns.table.inputs[actor], flushed, strict=True):
            self.send([message(Message.RETURN, edge)] * count)
        self.finish(actor)

    def exhaust(self, actor: int, code: int) -> None:
        """Take a firing back that found no more data, and finish."""
        columns, table = self.columns, self.columns.table
        columns.ring.append(code)
        # The firing was counted and its slots were taken when it started; it has filled none of
        # them.
        columns.firings[actor] -= 1
        for edge in table.outputs[actor]:
            columns.add(message(Message.FREE, edge), table.edges[edge].produce)
        columns.look_up_every_message(actor)
        for edge in table.all_inputs(actor):  # its admission: a source that ends has no input else
            permits = message(Message.READY, edge)
            columns.take(permits, columns.level[permits] + 1)
            columns.is_ended[edge] = True
        self.finish(actor)

    def finish(self, actor: int) -> None:
        """Hand back the tokens that no firing will read, pass End on, and wait for the slots."""
        columns, table = self.columns, self.columns.table
        for edge in table.inputs[actor]:
            code = message(Message.READY, edge)
            # The level leaves out one firing's rate; with it this is all that lies ready on the
            # edge.
            num_left = columns.level[code] + table.edges[edge].consume
            columns.take(code, num_left)
            self.send([message(Message.RETURN, edge)] * num_left)
        self.send([message(Message.END, e) for e in table.outputs[actor]])
        columns.state[actor] = _DRAINING
        self.end_if_home(actor)

    def hand_back(self, actor: int, code: int) -> None:
        """Hand tokens back at once that came too late for any firing."""
        columns = self.columns
        columns.ring.append(code)
        # The same edge with another kind. `columns.refill` is 0 by now: only the wiring has the
        # rate.
        self.send([code ^ Message.READY ^ Message.RETURN] * columns.wiring.refill[code])

    def settle_slot(self, actor: int, code: int) -> None:
        """Count a slot that came home, and end with the last one."""
        self.columns.count(code)
        self.end_if_home(actor)

    def settle_end(self, actor: int, code: int) -> None:
        """Note the end of an input, and end with the last one."""
        self.note_end(actor, code)
        self.end_if_home(actor)

    def end_if_home(self, actor: int) -> None:
        """End once every input has ended and every slot is home."""
        columns, table = self.columns, self.columns.table
        # A level at its limit: consumers have handed back every slot of the edge.
        homes = [message(Message.FREE, e) for e in table.outputs[actor]]
        if all(columns.is_ended[e] for e in table.all_inputs(actor)) and all(
            columns.level[code] == columns.limit[code] for code in homes
        ):
            columns.state[actor] = _ENDED
            columns.num_open -= 1


_WAITING, _FIRING = int(State.WAITING), int(State.FIRING)
_FAILED = int(State.FAILED)
# States from DRAINING on start no firing any more; `admit` compares with >=.
_OVER = (_DRAINING, _ENDED)
_COUNT, _COMPLETE = REACTION_CODES[Reaction.COUNT], REACTION_CODES[Reaction.COMPLETE]


class Machine:
    """The state of one run of an actor graph.

    `outbox` holds messages to deliver. `fireable` names the actors that have started a firing and
    must be run, in order; `detached` likewise those with a thread of their own; `flushing` those of
    either sort that start their last, flushed firing. The caller takes from all, runs what was
    started, and reports each firing with one message: DONE, FAILED or EXHAUSTED. An actor that has
    all it needs in initial tokens starts when the machine is made.

    `columns` is all that changes. `start_causes[code]` counts the firings that message `code`
    started: it brought the last thing missing. It serves statistics (see `causes`); nothing else
    reads it.
    """

    __slots__ = (
        "_ending", "_note", "_posts", "_send", "_slow", "_start_in", "_takes", "columns",
        "detached", "fireable", "flushing", "outbox", "start_causes", "table",
    )  # fmt: skip

    columns_type, ending_type = MachineState, Ending

    def __init__(self, table: MachineTable) -> None:
        self.table = table
        self.columns = columns = self.columns_type(table)
        self._ending = ending = self.ending_type(columns)
        self.outbox, self.flushing = columns.outbox, columns.flushing
        self.fireable, self.detached = columns.fireable, columns.detached
        self._start_in = [
            self.detached.append if is_detached else self.fireable.append
            for is_detached in table.is_detached
        ]
        self._note = columns.ring.append
        self._send = columns.outbox.extend
        self._takes, self._posts = columns.wiring.takes, columns.wiring.posts
        self.start_causes = [0] * len(columns.level)
        self._slow = {REACTION_CODES[r]: react for r, react in ending.reactions().items()}
        self._slow[REACTION_CODES[Reaction.ILLEGAL]] = self._reject
        self._slow[REACTION_CODES[Reaction.FAIL]] = self._fail
        # A list first: `_start` changes `unmet` while this goes on.
        for actor in [a for a, unmet in enumerate(columns.unmet) if not unmet]:
            self._start(actor)

    # -- what the caller may ask for -------------------------------------------------------------

    def admit(self, actor: int, count: int) -> None:
        """Permit `count` more firings of a source; no effect on a source that has no more data.

        Raises ProtocolError when the actor is no source or its admission was ended.
        """
        edge, columns = self._admission(actor), self.columns
        if columns.state[actor] >= _DRAINING:
            return
        if columns.is_ended[edge] or count < 1:
            raise ProtocolError(
                f"source {self.table.names[actor]!r} was admitted to {count} firings; expected one"
                " or more, before admission ends"
            )
        self.receive(message(Message.READY, edge))
        # The first permit has started a firing, or something else is missing: the others start
        # none.
        columns.add(message(Message.READY, edge), count - 1)

    def end_admission(self, actor: int, limit: int | None = None) -> None:
        """Permit a source no more than what is admitted, and no more than `limit` firings in all.

        A second call can only lower the limit. Raises ProtocolError when the actor is no source.
        """
        edge, columns = self._admission(actor), self.columns
        if limit is not None:
            code = message(Message.READY, edge)
            # An admission edge has rate 1, so its level is one less than the permits that are left.
            surplus = columns.level[code] + 1 - max(0, limit - columns.firings[actor])
            columns.take(code, max(0, surplus))
        if not columns.is_ended[edge]:
            self.receive(message(Message.END, edge))
        elif columns.state[actor] == _WAITING:
            # Admission had ended before and permits are fewer now: no message will come that closes
            # it.
            self._ending.close(actor)

    def halt(self) -> None:
        """Start nothing more. What runs may finish, and messages may still be delivered."""
        self.columns.halt()

    @property
    def is_finished(self) -> bool:
        """Whether every actor has ended and every slot is home."""
        return not self.columns.num_open

    @property
    def is_halted(self) -> bool:
        """Whether an actor failed or the machine was halted."""
        return self.columns.is_halted

    @property
    def is_quiescent(self) -> bool:
        """Whether nothing runs and nothing is left to deliver. Linear in actors."""
        return not self.outbox and not any(s in (_FIRING, _FLUSHING) for s in self.columns.state)

    def state(self, actor: int) -> State:
        """Return the state of an actor."""
        return State(self.columns.state[actor])

    def firing_index(self, actor: int) -> int:
        """Return the index of the running or else the last firing; -1 before the first."""
        return self.columns.firings[actor] - 1

    def flush_tokens(self, actor: int) -> tuple[int, ...]:
        """Return how many tokens the last firing of a flushed actor took, per input port."""
        return self.columns.flush_tokens[actor]

    def story(self, actor: int) -> tuple[str, ...]:
        """Return what last happened to an actor and its neighbours in words, oldest first.

        Ready and Free of ordinary life are left out: they follow from the neighbours' DONE.
        """
        return self.columns.story(actor)

    def last_messages(self, limit: int) -> tuple[str, ...]:
        """Return the last messages of all actors in words, at most `limit`, oldest first.

        At least 1,000 are known. The Ready and Free of ordinary life are told with the DONE that
        sends them. Any thread may ask.
        """
        # Copied in one call of C: the dispatcher may append to the ring meanwhile.
        state, codes = self.columns.state, tuple(self.columns.ring)
        flushed = [a for a, t in enumerate(self.columns.flush_tokens) if t and state[a] in _OVER]
        return message_history(self.table, self._posts, flushed, codes, limit)

    def causes(self, actor: int) -> tuple[tuple[str, str, int], ...]:
        """Return how many firings each thing started that came last.

        See `actors.machine.columns.causes`.
        """
        return causes(self.table, self.start_causes, actor)

    def waits_for(self, actor: int) -> tuple[str, ...]:
        """Return what an actor lacks for its next firing, in words."""
        return describe_missing(self.table, self._takes[actor], self.columns.level)

    def missing_messages(self, actor: int) -> tuple[int, ...]:
        """Return the messages that an actor waits for before it can fire again, or end.

        READY and FREE stand for a token and a slot that is missing, END for the end of an input.
        """
        columns = self.columns
        ends = [message(Message.END, e) for e in self.table.all_inputs(actor)]
        ends = [code for code in ends if not columns.is_ended[subject_of(code)]]
        free = [message(Message.FREE, e) for e in self.table.outputs[actor]]
        if columns.state[actor] == _DRAINING:
            return (*ends, *[code for code in free if columns.level[code] < columns.limit[code]])
        # An input that has ended brings no token any more: only open ones can be waited for.
        ready = [code ^ Message.END ^ Message.READY for code in ends]
        return tuple([code for code in (*ready, *free) if columns.level[code] < 0])

    def stall(self) -> str:
        """Return who waits for what, for the error about a run that cannot go on."""
        open_ = [a for a in range(self.table.num_actors) if self.columns.state[a] != _ENDED]
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
        columns = self.columns
        refills, levels, unmets = columns.refill, columns.level, columns.unmet
        states, limits, owners = columns.state, columns.limit, columns.owner
        takes, causes = self._takes, self.start_causes
        for code in codes:
            try:
                refill = refills[code]
            # Past the padding of `Wiring`: no edge or actor has this number.
            except IndexError:
                columns.refuse(code)
            if refill:
                # The table's cell is COUNT, looked up in advance: see `MachineState`.
                level = levels[code] + refill
                if level >= refill:
                    # The condition was met before: nothing new can fire. Only here can a slot be
                    # one too many, because a level that crosses zero is below its limit while slots
                    # come and go by whole firings: see `MachineState.count`.
                    if level > limits[code]:
                        columns.refuse(code)
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
                    # Before it may start again: consumers and producers hear of firing k before
                    # firing k+1 begins.
                    self._send(self._posts[actor])
                    states[actor] = _WAITING
                    unmet = unmets[actor] - 1
                    if unmet:
                        unmets[actor] = unmet
                        # An End that came while the actor fired was only noted: it is looked at
                        # here.
                        if columns.has_end[actor]:
                            self._ending.close(actor)
                        continue
                elif reaction == _COUNT:
                    columns.count(code)
                    if unmets[actor]:
                        continue
                else:
                    self._slow[reaction](actor, code)
                    continue
            # Nothing is missing: start a firing as in `_start`, without a call.
            causes[code] += 1
            # The running firing is itself an unmet condition of the next one.
            unmet = 1
            for condition, count in takes[actor]:
                level = levels[condition] - count
                levels[condition] = level
                if level < 0:
                    unmet += 1
            unmets[actor] = unmet
            states[actor] = _FIRING
            columns.firings[actor] += 1
            self._start_in[actor](actor)

    # -- off the hot path ------------------------------------------------------------------------

    def _start(self, actor: int) -> None:
        """Start a firing: take its tokens and slots."""
        columns = self.columns
        for code, count in self._takes[actor]:
            columns.take(code, count)
        columns.unmet[actor] += 1
        columns.state[actor] = _FIRING
        columns.firings[actor] += 1
        self._start_in[actor](actor)

    def _admission(self, actor: int) -> int:
        edge = self.table.admission[actor] if 0 <= actor < self.table.num_actors else None
        if edge is None:
            raise ProtocolError(f"actor {actor} is no source without inputs: it is not admitted")
        return edge

    def _reject(self, actor: int, code: int) -> None:
        self.columns.refuse(code)

    def _fail(self, actor: int, code: int) -> None:
        self._note(code)
        # What the firing had taken stays taken, which `check_edges` counts as held.
        self.columns.state[actor] = _FAILED
        self.halt()

    # -- invariants ------------------------------------------------------------------------------

    def validate(self, in_transit: Iterable[int] = ()) -> None:
        """Check every invariant, in time linear in edges, actors and messages.

        `in_transit` are messages taken from the outbox and not yet received. Raises InternalError
        naming the edge or actor that does not add up.
        """
        columns, moving = self.columns, Counter(chain(self.outbox, in_transit))
        check_edges(self.table, columns.level, columns.state, columns.flush_tokens, moving)
        check_actors(
            self.table, columns.level, columns.state, columns.unmet, columns.num_open,
            columns.is_halted,
        )  # fmt: skip
