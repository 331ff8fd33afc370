"""The order in which a pipeline reads samples: a pure function of (seed, epoch, position).

So a position is one number, whatever the order, and a run that goes on from it reads what would
have come. Nothing is kept of what was read but the window that is being read.

`Passes` reads all samples in every epoch: in their own order, in one of all permutations by number
(`EpochOrder`), or, for files that are read in blocks, the blocks in a permuted order and the
samples of a window of some blocks in a permuted order again. `Drawn` draws with weights, and
`Mixed` takes turns between several orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from actorflow.data.arrays import EpochOrder
from actorflow.data.samples import generator
from actorflow.data.source import DataError, checked_seed

Numbers = npt.NDArray[np.int64]


class SampleOrder(Protocol):
    """Which sample comes at each position of each epoch."""

    @property
    def length(self) -> int:
        """Positions in an epoch."""

    @property
    def epochs(self) -> int | None:
        """How many epochs there are; None for no end."""

    @property
    def is_seamless(self) -> bool:
        """Whether an epoch is a number of positions and no more: no batch ends with it."""

    def blocks_at_once(self, num_blocks: int) -> int:
        """Return among how many blocks of samples the next ones lie, of `num_blocks` there are."""

    def at(self, epoch: int, first: int, count: int) -> tuple[Numbers, Numbers]:
        """Return the samples at positions [first, first + count), and the epoch of each."""

    def shuffled(self, seed: int, buffer: int | None) -> SampleOrder:
        """Return the same samples in another order. Raises DataError where there is none."""

    def repeated(self, epochs: int | None) -> SampleOrder:
        """Return the same order for that many epochs."""

    def fingerprint(self) -> str:
        """Return what the order depends on."""


@dataclass(frozen=True)
class Passes:
    """Every sample once in each epoch.

    Args:
        length: of the samples.
        blocks: how many samples lie together; () where each is read alone.
        seed: of the order; None for the samples' own.
        window: samples among which one is drawn, in whole blocks; None for all of them, by number.
        epochs: how often all samples come.
    """

    length: int
    blocks: tuple[int, ...] = ()
    seed: int | None = None
    window: int | None = None
    epochs: int | None = 1
    is_seamless = False

    def at(self, epoch: int, first: int, count: int) -> tuple[Numbers, Numbers]:
        """Return the samples at some positions; of a window, it is kept in memory by number."""
        if self.window is None:
            numbers = self._permuted.items(epoch, first, count)
        else:
            numbers = self._windows.at(epoch, first, count)
        return numbers, np.full(count, epoch, np.int64)

    def blocks_at_once(self, num_blocks: int) -> int:
        """Return how many blocks a window has; one is enough for the samples' own order."""
        return 1 if self.window is None else self._windows.per_window

    @property
    def has_buffer(self) -> bool:
        """Whether somebody has asked for a window."""
        return self.window not in (None, _BLOCKS_OF_WINDOW * max(self.blocks, default=0))

    @cached_property
    def _permuted(self) -> EpochOrder:
        return EpochOrder(self.length, self.seed or 0, shuffle=self.seed is not None)

    @cached_property
    def _windows(self) -> _ShuffleWindows:
        blocks = self.blocks
        if not blocks and self.window:
            whole, rest = divmod(self.length, self.window)
            blocks = (self.window,) * whole + (rest,) * (rest > 0)
        return _ShuffleWindows(np.array(blocks, np.int64), self.window or 1, self.seed or 0)

    def shuffled(self, seed: int, buffer: int | None) -> Passes:
        """Return a permuted order. Samples that lie in blocks are permuted within a window."""
        if buffer is None and self.blocks:
            buffer = _BLOCKS_OF_WINDOW * max(self.blocks)
        EpochOrder(1, seed)  # which takes none below 0
        return replace(self, seed=checked_seed(seed), window=buffer)

    def repeated(self, epochs: int | None) -> Passes:
        """Return the same order for that many epochs."""
        return replace(self, epochs=epochs)

    def fingerprint(self) -> str:
        """Return seed, window and epochs."""
        return f"passes({self.length},{self.seed},{self.window},{self.epochs})"


_BLOCKS_OF_WINDOW = 4
"""Blocks in memory: an order of single samples would read a block for each."""


class _ShuffleWindows:
    """Blocks in a permuted order, and the samples of some neighbours of it in a permuted order."""

    def __init__(self, blocks: Numbers, window: int, seed: int) -> None:
        self._blocks, self._seed = blocks, seed
        self._starts = np.concatenate([[0], np.cumsum(blocks)])
        mean = max(1, int(blocks.sum()) // max(1, len(blocks)))
        self.per_window = max(1, window // mean)
        self._order = EpochOrder(len(blocks), seed)
        self._epoch = -1
        self._kept = -1
        self._begins = self._permuted = self._window = np.empty(0, np.int64)

    def at(self, epoch: int, first: int, count: int) -> Numbers:
        self._turn_to(epoch)
        out = np.empty(count, np.int64)
        filled = 0
        while filled < count:
            number = int(np.searchsorted(self._begins, first + filled, side="right")) - 1
            inside = first + filled - int(self._begins[number])
            part = self._of(number)[inside : inside + count - filled]
            out[filled : filled + len(part)] = part
            filled += len(part)
        return out

    def _turn_to(self, epoch: int) -> None:
        if self._epoch == epoch:
            return
        self._permuted = np.array(self._order.items(epoch, 0, len(self._blocks)))
        ends = np.cumsum(self._blocks[self._permuted])
        lasts = ends[self.per_window - 1 :: self.per_window]
        begins = np.concatenate([[0], lasts])
        self._begins = begins[begins < ends[-1]]
        self._epoch, self._kept = epoch, -1

    def _of(self, number: int) -> Numbers:
        if self._kept != number:
            first = number * self.per_window
            blocks = self._permuted[first : first + self.per_window]
            pieces = [np.arange(self._starts[b], self._starts[b + 1]) for b in blocks]
            draws = generator((self._seed, self._epoch, number))
            self._window = draws.permutation(np.concatenate(pieces))
            self._kept = number
        return self._window


@dataclass(frozen=True)
class Drawn:
    """Samples drawn with replacement, each as likely as its weight: `length` of them an epoch."""

    length: int
    weights: tuple[float, ...]
    seed: int
    epochs: int | None = 1
    is_seamless = True

    def blocks_at_once(self, num_blocks: int) -> int:
        """Return all: the next sample may be any."""
        return num_blocks

    @cached_property
    def _bounds(self) -> npt.NDArray[np.float64]:
        sums: npt.NDArray[np.float64] = np.cumsum(np.array(self.weights, np.float64))
        return np.asarray(sums / sums[-1])

    def at(self, epoch: int, first: int, count: int) -> tuple[Numbers, Numbers]:
        """Return the draws at some positions: each has a random number of its own."""
        draws = np.empty(count)
        for block in range(first // _DRAWS, (first + count - 1) // _DRAWS + 1):
            begin, end = max(first, block * _DRAWS), min(first + count, (block + 1) * _DRAWS)
            own = generator((self.seed, epoch, block)).random(_DRAWS)
            draws[begin - first : end - first] = own[begin - block * _DRAWS :][: end - begin]
        # "right", so that a sample of weight 0 is never drawn.
        numbers = np.searchsorted(self._bounds, draws, side="right").astype(np.int64)
        return numbers, np.full(count, epoch, np.int64)

    def shuffled(self, seed: int, buffer: int | None) -> SampleOrder:
        """Raise DataError."""
        raise DataError("pipeline: what .sample draws is in a random order already; leave out"
                        " .shuffle, and give .sample(seed=)")  # fmt: skip

    def repeated(self, epochs: int | None) -> Drawn:
        """Return the same draws for that many epochs, other ones in each."""
        return replace(self, epochs=epochs)

    def fingerprint(self) -> str:
        """Return a hash of the weights and the seed."""
        words = np.array(self.weights).tobytes()
        return f"drawn({self.length},{hash_of(words)},{self.seed},{self.epochs})"


_DRAWS = 256
"""Draws that are made at once: a generator costs as much as hundreds of its numbers."""


@dataclass(frozen=True)
class Mixed:
    """Takes turns between several orders, in the proportion of weights.

    Of each `_TURNS` positions every part has as many as its weight asks for, to within one over all
    of the run, and they come in a random order. A part that is at its end begins its next epoch.
    """

    parts: tuple[SampleOrder, ...]
    starts: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int
    epochs: int | None = None
    is_seamless = True

    @property
    def length(self) -> int:
        """As many as all parts have together."""
        return sum([part.length for part in self.parts])

    def blocks_at_once(self, num_blocks: int) -> int:
        """Return nothing to add: each part has asked for its own."""
        return 0

    @cached_property
    def _shares(self) -> npt.NDArray[np.float64]:
        weights = np.array(self.weights, np.float64)
        return np.concatenate([[0.0], np.cumsum(weights / weights.sum())])

    def _taken(self, block: int) -> Numbers:
        """Return how many samples each part has given before a block of turns."""
        # Rounded sums of shares: each part gets the difference, and all get `block * _TURNS`.
        bounds = np.rint(self._shares * block * _TURNS)
        bounds[-1] = block * _TURNS
        return np.diff(bounds).astype(np.int64)

    def at(self, epoch: int, first: int, count: int) -> tuple[Numbers, Numbers]:
        """Return the samples at some positions, each with the epoch of its part."""
        begin = epoch * self.length + first
        numbers, epochs = np.empty(count, np.int64), np.empty(count, np.int64)
        for block in range(begin // _TURNS, (begin + count - 1) // _TURNS + 1):
            before, after = self._taken(block), self._taken(block + 1)
            turns = np.repeat(np.arange(len(self.parts)), after - before)
            turns = generator((self.seed, block)).permutation(turns)
            first_turn = max(begin, block * _TURNS)
            last_turn = min(begin + count, (block + 1) * _TURNS)
            for part in range(len(self.parts)):
                places = np.flatnonzero(turns == part) + block * _TURNS
                positions = before[part] + np.arange(len(places))
                asked = (places >= first_turn) & (places < last_turn)
                out = places[asked] - begin
                numbers[out], epochs[out] = self._of(part, positions[asked])
        return numbers, epochs

    def _of(self, part: int, positions: Numbers) -> tuple[Numbers, Numbers]:
        order, numbers, epochs = self.parts[part], np.empty_like(positions), positions.copy()
        done = 0
        while done < len(positions):
            epoch, first = divmod(int(positions[done]), order.length)
            count = min(len(positions) - done, order.length - first)
            some = order.at(epoch, first, count)
            numbers[done : done + count], epochs[done : done + count] = some
            done += count
        return numbers + self.starts[part], epochs

    def shuffled(self, seed: int, buffer: int | None) -> SampleOrder:
        """Raise DataError."""
        raise DataError("pipeline: a mixture has a random order of turns; shuffle its parts before"
                        " they are mixed")  # fmt: skip

    def repeated(self, epochs: int | None) -> Mixed:
        """Return the same mixture, which ends after that many times the samples of all parts."""
        return replace(self, epochs=epochs)

    def fingerprint(self) -> str:
        """Return those of the parts, the weights and the seed."""
        parts = ";".join([part.fingerprint() for part in self.parts])
        return f"mixed({parts},{self.weights},{self.seed},{self.epochs})"


_TURNS = 256
"""Turns whose order is drawn at once."""


def separate(order: Any) -> Any:
    """Return an equal order that shares no window with it: each thread has its own."""
    parts = getattr(order, "parts", None)
    return replace(order) if parts is None else replace(order, parts=tuple(map(separate, parts)))


def hash_of(content: bytes) -> str:
    """Return the hash of some bytes, in hex."""
    return str(xxhash.xxh3_128_hexdigest(content))


def checked_weights(weights: Sequence[float], count: int, what: str) -> tuple[float, ...]:
    """Return weights as numbers. Raises DataError unless there is one for each, from 0 up."""
    numbers = np.asarray(weights)
    if numbers.shape != (count,) or numbers.dtype.kind not in "biuf":
        raise DataError(
            f"pipeline: expected {count:,} weights, one for each {what}, came"
            f" {numbers.dtype}{list(numbers.shape)}"
        )
    numbers = numbers.astype(np.float64)
    wrong = np.flatnonzero(~np.isfinite(numbers) | (numbers < 0))
    if len(wrong):
        raise DataError(
            f"pipeline: expected weights from 0 up, came {numbers[wrong[0]]} for {what}"
            f" {wrong[0]:,}, and {len(wrong) - 1:,} more such"
        )
    total = sum(numbers.tolist())  # which may be infinite
    if not 0 < total < np.inf:
        raise DataError(
            f"pipeline: expected weights for each {what} with a finite sum above 0, came {total}"
        )
    return tuple(numbers.tolist())
