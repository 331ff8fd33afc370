"""The table of a chain of blocks: the least time for any part of it and any number of slots.

C[s, t][m] is the least time of forward ops for going through blocks s..t and back over them in m
slots of bytes, where the stages after t are done and the input of s lies outside m:

    keep an option k of s..u:  C[u + 1, t][m - saved_k] + duration_k
        where m >= forward_peak_k + gradients before stage t, and m >= stage_peak_k
    drop up to j in s + 1..t:  C[j, t][m - input of j] + C[s, j - 1][m] + duration through s..j - 1
        where m >= the peaks of passing through s..j - 1 + gradients before stage t

(Beaumont et al., "Optimal checkpointing for heterogeneous chains", arXiv 1911.13214, 2019, with
save-sets of one or several blocks in place of one way to keep a block.) Bytes are rounded up to
slots, so a plan needs at most what its slots say. Equal parts share one row: a deep model of equal
layers has O(L) of them, not O(L^2).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from memory.liveness import IntArray
from memory.recompute.local import PlacedBlock
from memory.recompute.options import BlockOptions, Option
from memory.recompute.save_sets import FloatArray, SweepPass


@dataclass(frozen=True, slots=True)
class BlockRun:
    """One block of the chain, or neighbouring ones taken as one."""

    placed: PlacedBlock
    options: BlockOptions


@dataclass(frozen=True, slots=True)
class Keep:
    """Go on after the forward ops of so many blocks, having saved what the option says."""

    num_blocks: int
    option: Option
    which: SweepPass


@dataclass(frozen=True, slots=True)
class Drop:
    """Pass through the blocks before `middle`, go on from there, then do them again."""

    middle: int


@dataclass(frozen=True, slots=True)
class BlockChain:
    """Per block the runs that begin with it, shortest first: itself, then with those after it.

    row[s, t] numbers the parts s..t; equal ones have equal numbers, all below num_rows.
    """

    runs: tuple[tuple[BlockRun, ...], ...]
    row: npt.NDArray[np.int64]
    num_rows: int

    @classmethod
    def of(cls, runs: tuple[tuple[BlockRun, ...], ...]) -> BlockChain:
        """Number the parts. O(L^2)."""
        length = len(runs)
        symbols: dict[tuple[object, ...], int] = {}
        numbers: dict[tuple[int, int, bool], int] = {}
        row = np.full((length + 1, length), -1, np.int64)
        for s in reversed(range(length)):
            looks = tuple(
                (r.placed.kind, r.placed.before_bytes, r.placed.around_bytes) for r in runs[s]
            )
            symbol = symbols.setdefault(looks, len(symbols))
            for t in range(s, length):
                rest = int(row[s + 1, t]) if s < t else -1
                key = (symbol, rest, t == length - 1)
                row[s, t] = numbers.setdefault(key, len(numbers))
        return cls(runs, row, len(numbers))

    @property
    def length(self) -> int:
        """Return the number of blocks."""
        return len(self.runs)

    @property
    def num_terms(self) -> int:
        """Return over how many terms per slot the table takes its minima: what it costs."""
        _, first = np.unique(self.row, return_index=True)
        s, t = np.unravel_index(first, self.row.shape)
        options = [sum([len(run.options.again) for run in runs]) for runs in self.runs]
        is_part = s <= t
        return int((t - s)[is_part].sum() + np.array(options)[s[is_part]].sum())

    def input_bytes(self, s: int) -> int:
        """Return the size of the input of block s."""
        return self.runs[s][0].placed.local.input_bytes

    def gradient_bytes(self, t: int) -> int:
        """Return the bytes of gradients that live where stage t begins."""
        return self.runs[t][0].placed.before_bytes


@dataclass(frozen=True, slots=True)
class _Keeps:
    """The ways to keep a run at the start of a part, by column: slots and time of each.

    rest: the row of what comes after the run; the row of zeros where nothing does.
    """

    keeps: tuple[Keep, ...]
    need: IntArray
    saved: IntArray
    duration: FloatArray
    rest: IntArray


@dataclass(frozen=True, slots=True)
class _Drops:
    """Per j in s + 1..t: the slots and the time it takes to get there, the rows of both halves."""

    need: IntArray
    duration: FloatArray
    ahead: IntArray
    after: IntArray


class SlotTable:
    """C for budgets up to `limit_bytes`, in `num_slots` slots. O(num_terms num_slots)."""

    __slots__ = ("_chain", "_drops", "_keeps", "_least", "_shifted", "num_slots", "slot_bytes")

    def __init__(self, chain: BlockChain, limit_bytes: int, num_slots: int) -> None:
        self._chain = chain
        self.num_slots = num_slots
        self.slot_bytes = max(1, -(-limit_bytes // num_slots))
        self._least = np.full((chain.num_rows + 1, num_slots + 1), np.inf)
        self._least[chain.num_rows] = 0.0
        self._shifted = np.full((chain.num_rows, num_slots + 1), np.inf)
        self._keeps: dict[int, _Keeps] = {}
        self._drops: dict[int, _Drops] = {}
        for s in reversed(range(chain.length)):
            shift = self._slots(chain.input_bytes(s))
            for t in range(s, chain.length):
                row = int(chain.row[s, t])
                if row not in self._keeps:
                    self._keeps[row] = self._list_keeps(s, t)
                    self._drops[row] = self._list_drops(s, t)
                    self._fill(row)
                    if shift <= num_slots:
                        self._shifted[row, shift:] = self._least[row, : num_slots + 1 - shift]

    @property
    def least(self) -> FloatArray:
        """Return the least time of the whole chain per number of slots; inf where it cannot be."""
        row: FloatArray = self._least[self._chain.row[0, -1]]
        return row

    def choice(self, s: int, t: int, slots: int) -> tuple[Keep | Drop, int]:
        """Return what attains C[s, t][slots], and the slots left to go on with after it.

        C is finite there. O(L + options).
        """
        row = int(self._chain.row[s, t])
        keeps, drops = self._keeps[row], self._drops[row]
        left = np.minimum(slots - keeps.saved, self.num_slots)
        kept = self._least[keeps.rest, np.maximum(left, 0)] + keeps.duration
        kept[(keeps.need > slots) | (left < 0)] = np.inf
        k = int(kept.argmin())
        if drops.need.size:
            dropped = self._shifted[drops.ahead, slots] + self._least[drops.after, slots]
            dropped += drops.duration
            dropped[drops.need > slots] = np.inf
            j = int(dropped.argmin())
            if dropped[j] < kept[k]:
                taken = self._slots(self._chain.input_bytes(s + 1 + j))
                return Drop(s + 1 + j), slots - taken
        return keeps.keeps[k], int(left[k])

    def _slots(self, size_bytes: int) -> int:
        return -(-size_bytes // self.slot_bytes)

    def _list_keeps(self, s: int, t: int) -> _Keeps:
        chain, keeps, peaks = self._chain, list[Keep](), list[int]()
        gradients = chain.gradient_bytes(t)
        for length, run in enumerate(chain.runs[s][: t - s + 1], start=1):
            which, options = SweepPass.AGAIN, run.options.again
            if t == chain.length - 1:
                which, options = SweepPass.FIRST, run.options.first
            elif s + length - 1 == t:
                which, options = SweepPass.ALONE, run.options.alone
            keeps += [Keep(length, option, which) for option in options]
            around = run.placed.around_bytes
            peaks += [max(o.forward_peak + gradients, o.stage_peak + around, 0) for o in options]
        lasts = [s + k.num_blocks - 1 for k in keeps]
        return _Keeps(
            tuple(keeps),
            -(-np.array(peaks, np.int64) // self.slot_bytes),
            -(-np.array([k.option.saved_bytes for k in keeps], np.int64) // self.slot_bytes),
            np.array([k.option.duration for k in keeps], np.float64),
            np.array([chain.row[u + 1, t] if u < t else chain.num_rows for u in lasts], np.int64),
        )

    def _list_drops(self, s: int, t: int) -> _Drops:
        chain = self._chain
        blocks = [chain.runs[b][0].options for b in range(s, t)]
        is_first = t == chain.length - 1
        passes = [o.through_first if is_first else o.through_again for o in blocks]
        peaks = [p.held_peak if k == 0 else p.passing_peak for k, p in enumerate(passes)]
        gradients = chain.gradient_bytes(t)
        return _Drops(
            np.array([self._slots(p + gradients) for p in accumulate(peaks, max)], np.int64),
            np.array(list(accumulate([p.duration for p in passes])), np.float64),
            chain.row[s + 1 : t + 1, t],
            chain.row[s, s:t],
        )

    def _fill(self, row: int) -> None:
        least, size = self._least[row], self.num_slots + 1
        keeps, drops = self._keeps[row], self._drops[row]
        columns = (keeps.need, keeps.saved, keeps.duration, keeps.rest)
        for need, saved, duration, rest_row in zip(*[c.tolist() for c in columns], strict=True):
            start = max(need, saved)
            if start >= size:
                continue
            rest = self._least[rest_row]
            end = max(start, min(size, size + saved))  # beyond, where saving frees, all slots
            values = rest[start - saved : end - saved] + duration
            np.minimum(least[start:end], values, out=least[start:end])
            np.minimum(least[end:], rest[-1] + duration, out=least[end:])
        if drops.need.size:
            values = self._least[drops.after]
            values += self._shifted[drops.ahead]
            values += drops.duration[:, None]
            for j, need in enumerate(drops.need.tolist()):
                values[j, :need] = np.inf
            np.minimum(least, values.min(axis=0), out=least)
