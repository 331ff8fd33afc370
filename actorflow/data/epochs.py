"""Epochs: how many batches they are, and a source that starts again at its end.

An epoch is one pass of a source. One that knows its passes gives all of them itself, each in
another order where it shuffles. Any other is started again when it ends.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any, Protocol, Self, runtime_checkable

from actorflow.data.pipeline import Pipeline
from actorflow.data.source import Batch, DataError, DataSource, EndlessSource, specs_of
from compiler.contract.types import TensorType

_KIND = "epochs"


@runtime_checkable
class KnowsPasses(Protocol):
    """A source that goes on after its end."""

    def passes(self, epochs: int) -> tuple[DataSource, Fraction]:
        """Return the same source without an end, and how many batches so many passes are."""
        ...


@dataclass(frozen=True, slots=True)
class SourcePasses:
    """Some passes of a source: `batches` in all, None where it is not known before they end."""

    count: int
    source: DataSource
    batches: Fraction | None

    def epoch_of(self, batch: int) -> int | None:
        """Return the pass, from 1, of a batch, from 1, that was taken; None where it is unknown."""
        if isinstance(self.source, EpochSource):
            return self.source.epoch_of(batch)
        if self.batches is None:
            return None
        return min(max(1, ceil(batch * self.count / self.batches)), self.count)


def epochs_of(source: DataSource, count: int) -> SourcePasses:
    """Return so many passes of a source. Raises DataError for one that never ends."""
    if isinstance(source, Pipeline):
        return _of_pipeline(source, count)
    if isinstance(source, KnowsPasses):
        return SourcePasses(count, *source.passes(count))
    try:
        length = len(source) if isinstance(source, Sized) else None
    except EndlessSource as error:
        raise DataError(f"epochs= counts passes of the data: {error}; give steps=") from None
    except TypeError:  # it ends, and does not know when
        length = None
    batches = None if length is None else Fraction(length * count)
    return SourcePasses(count, EpochSource(source, count, length), batches)


def _of_pipeline(source: Pipeline, count: int) -> SourcePasses:
    own, batches = source.description, None
    epochs = count * (own.order.epochs or 1)
    whole = source.repeat(epochs)
    if not own.drops:
        batches, collation = Fraction(len(whole)), own.collation
        if collation is not None and not own.drop_last:
            batches = Fraction(own.order.length * epochs, collation.size)
        # A mask fills up the last batch of all, which is another one with more epochs.
        if collation is None or not collation.mask or batches.denominator == 1:
            whole = source.repeat()  # which is the same data for any number of epochs
    whole.restore(source.state())
    return SourcePasses(count, whole, batches)


class EpochSource:
    """A source that is started again when it ends, until it has ended so many times.

    It begins again where it stood when this was made. A source with a method `set_epoch(number)`,
    as torch's samplers have, is told of each epoch, from 0, before it begins.

    Args:
        source: used by this one alone from now on.
        epochs: how often it is read.
        length: batches that it says a pass has; None where it does not say.
    """

    def __init__(self, source: DataSource, epochs: int, length: int | None = None) -> None:
        self._source, self._epochs, self._length = source, epochs, length
        self._begin = dict(source.state())
        self._epoch = self._batches = 0
        # Batches of all passes up to the end of each that has ended.
        self._ends: list[int] = []

    @property
    def items_per_batch(self) -> Any:
        """As the source has it; None where it does not say."""
        return getattr(self._source, "items_per_batch", None)

    @property
    def item_name(self) -> str:
        """As the source has it."""
        return str(getattr(self._source, "item_name", "samples"))

    def spec(self) -> dict[str, TensorType]:
        """Return the types of the source's batches."""
        return self._source.spec()

    def specs(self) -> tuple[dict[str, TensorType], ...]:
        """Return all types that the source declares."""
        return specs_of(self._source)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next batch, of the next pass where one ends.

        Raises:
            StopIteration: all passes are over, or one had no batch.
        """
        while self._epoch < self._epochs:
            try:
                batch = next(self._source)
            except StopIteration:
                count = self._batches - (self._ends[-1] if self._ends else 0)
                if not count:
                    raise
                if self._length not in (None, count):
                    logging.getLogger("actorflow").warning(
                        "pass %d of the data had %d batches, and its length is %d, by which the"
                        " steps of fit(epochs=) are counted", self._epoch + 1, count, self._length
                    )  # fmt: skip
                self._ends.append(self._batches)
                self._epoch += 1
                if self._epoch < self._epochs:
                    self._start()
                continue
            self._batches += 1
            return batch
        raise StopIteration

    def origins(self) -> tuple[str, ...]:
        """Return where each row of the next batch comes from, as far as the source says."""
        return tuple(getattr(self._source, "origins", tuple)())

    def _start(self) -> None:
        set_epoch = getattr(self._source, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._epoch)
        self._source.restore(self._begin)

    def epoch_of(self, batch: int) -> int:
        """Return the pass, from 1, of a batch, from 1, that was returned."""
        return min(bisect_left(self._ends, batch) + 1, self._epochs)

    def state(self) -> dict[str, Any]:
        """Return the ends of the passes so far, and the position in the one that goes on."""
        position = {"batches": self._batches, "source": dict(self._source.state())}
        return {"kind": _KIND, "ends": list(self._ends), **position}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a position. Raises DataError for the state of another kind of source."""
        position = _position_of(state)
        if position is None:
            raise DataError(
                f"epochs: expected a state of fit(epochs=...), came {repr(dict(state))[:200]}; go"
                " on with steps= where the run began with it"
            )
        self._ends, self._batches = position
        # At the end of a run that had fewer epochs the source has ended, and begins again.
        self._epoch = len(self._ends)
        if self._ends and self._ends[-1] == self._batches and self._epoch < self._epochs:
            self._start()
        else:
            self._source.restore(state["source"])

    def fingerprint(self) -> str:
        """Return that of the source: how often it is read is no part of it."""
        return self._source.fingerprint()

    def close(self) -> None:
        """Close the source, if it can be closed."""
        close = getattr(self._source, "close", None)
        if callable(close):
            close()


def _position_of(state: Mapping[str, Any]) -> tuple[list[int], int] | None:
    """Return the ends of the passes and the number of batches in a state; None if it is none."""
    ends: Any = state.get("ends")
    batches: Any = state.get("batches")
    if state.get("kind") != _KIND or not isinstance(state.get("source"), Mapping):
        return None
    if not isinstance(ends, list) or any([type(place) is not int for place in (*ends, batches)]):
        return None
    places: list[int] = [0, *ends, batches]
    return (places[1:-1], places[-1]) if places == sorted(places) else None
