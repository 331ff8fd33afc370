"""How an actor comes to its end: what the machine does with a message that is not ordinary life.

Admission ends at the sources, and End follows the last token on every edge. An actor of which an
ended input holds less than a firing needs *closes*: a flushed one fires once more with what is left
(`_flush`), any other hands the rest back (`_finish`). Then it drains: it waits until its slots are
home and every input has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from actors.columns import Columns
from actors.transitions import Message, Reaction, State, message, subject_of

_CLOSING, _FLUSHING = int(State.CLOSING), int(State.FLUSHING)
_DRAINING, _ENDED = int(State.DRAINING), int(State.ENDED)


class Ending:
    """The reactions that lead to an end, on the columns of a machine.

    `send` takes messages to deliver, in order.
    """

    __slots__ = ("_columns", "send")

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self.send: Callable[[Iterable[int]], object] = columns.outbox.extend

    def reactions(self) -> Mapping[Reaction, Callable[[int, int], object]]:
        """Return what to call with the actor and the message, by reaction."""
        return {
            Reaction.NOTE_END: self._note_end,
            Reaction.END_INPUT: self._end_input,
            Reaction.RETRY: self._retry,
            Reaction.RETRY_END: self._retry_end,
            Reaction.FINISH: self._finish_flush,
            Reaction.HAND_BACK: self._hand_back,
            Reaction.SETTLE: self._settle_slot,
            Reaction.SETTLE_END: self._settle_end,
            Reaction.EXHAUST: self._exhaust,
        }

    def close(self, actor: int) -> None:
        """Leave the ordinary life if an ended input holds less than a firing needs."""
        columns = self._columns
        if columns.is_halted or not any(
            columns.is_ended[e] and columns.level[message(Message.READY, e)] < 0
            for e in columns.table.all_inputs(actor)
        ):
            return
        columns.unmet[actor] += 1
        columns.look_up_every_message(actor)
        if columns.table.is_flushed[actor]:
            columns.state[actor] = _CLOSING
            self._flush(actor)
        else:
            self._finish(actor)

    def _note_end(self, actor: int, code: int) -> None:
        columns, edge = self._columns, subject_of(code)
        if columns.is_ended[edge]:
            columns.refuse(code)
        columns.is_ended[edge] = columns.has_end[actor] = True
        columns.ring.append(code)

    def _end_input(self, actor: int, code: int) -> None:
        self._note_end(actor, code)
        self.close(actor)

    def _retry(self, actor: int, code: int) -> None:
        self._columns.count(code)
        self._flush(actor)

    def _retry_end(self, actor: int, code: int) -> None:
        self._note_end(actor, code)
        self._flush(actor)

    def _flush(self, actor: int) -> None:
        """Start the last firing once its outputs are free and no input can still bring it tokens.

        Waiting for every input makes the number of tokens flushed independent of the order of
        messages.
        """
        columns, table = self._columns, self._columns.table
        levels, edges = columns.level, table.edges
        codes = [message(Message.READY, e) for e in table.inputs[actor]]
        if (
            columns.is_halted
            or any(levels[c] < 0 and not columns.is_ended[subject_of(c)] for c in codes)
            or any(levels[message(Message.FREE, e)] < 0 for e in table.outputs[actor])
        ):
            return
        rates = [edges[subject_of(c)].consume for c in codes]
        tokens = [r + min(levels[c], 0) for c, r in zip(codes, rates, strict=True)]
        for code, count in zip(codes, tokens, strict=True):
            columns.take(code, count)
        for edge in table.outputs[actor]:
            columns.take(message(Message.FREE, edge), edges[edge].produce)
        columns.flush_tokens[actor] = tuple(tokens)
        columns.state[actor] = _FLUSHING
        columns.firings[actor] += 1
        columns.flushing.append(actor)

    def _finish_flush(self, actor: int, code: int) -> None:
        columns = self._columns
        columns.ring.append(code)
        self.send(columns.wiring.readies[actor])
        flushed = columns.flush_tokens[actor]
        for edge, count in zip(columns.table.inputs[actor], flushed, strict=True):
            self.send([message(Message.RETURN, edge)] * count)
        self._finish(actor)

    def _exhaust(self, actor: int, code: int) -> None:
        columns, table = self._columns, self._columns.table
        columns.ring.append(code)
        columns.firings[actor] -= 1
        for edge in table.outputs[actor]:
            columns.add(message(Message.FREE, edge), table.edges[edge].produce)
        columns.look_up_every_message(actor)
        for edge in table.all_inputs(actor):  # its admission: a source that ends has no input else
            permits = message(Message.READY, edge)
            columns.take(permits, columns.level[permits] + 1)
            columns.is_ended[edge] = True
        self._finish(actor)

    def _finish(self, actor: int) -> None:
        """Hand back the tokens that no firing will read, pass End on, and wait for the slots."""
        columns, table = self._columns, self._columns.table
        for edge in table.inputs[actor]:
            code = message(Message.READY, edge)
            left = columns.level[code] + table.edges[edge].consume
            columns.take(code, left)
            self.send([message(Message.RETURN, edge)] * left)
        self.send([message(Message.END, e) for e in table.outputs[actor]])
        columns.state[actor] = _DRAINING
        self._end_if_home(actor)

    def _hand_back(self, actor: int, code: int) -> None:
        columns = self._columns
        columns.ring.append(code)
        self.send([code ^ Message.READY ^ Message.RETURN] * columns.wiring.refill[code])

    def _settle_slot(self, actor: int, code: int) -> None:
        self._columns.count(code)
        self._end_if_home(actor)

    def _settle_end(self, actor: int, code: int) -> None:
        self._note_end(actor, code)
        self._end_if_home(actor)

    def _end_if_home(self, actor: int) -> None:
        columns, table = self._columns, self._columns.table
        homes = [message(Message.FREE, e) for e in table.outputs[actor]]
        if all(columns.is_ended[e] for e in table.all_inputs(actor)) and all(
            columns.level[code] == columns.limit[code] for code in homes
        ):
            columns.state[actor] = _ENDED
            columns.num_open -= 1
