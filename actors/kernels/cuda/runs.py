"""A run of columns of one thread, in words of 32 bits, and how it comes from memory and goes there.

Wide accesses move 16 bytes at once (8 or 4, where a run has no more), narrow ones an element each;
either way the same words are in registers after that, and the same instructions compute on them. So
a launch may choose by its addresses, and no bit depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.kernels.codegen.values import indented
from compiler.types import DType

WIDEST = 16
"""Bytes that a thread moves at once, at most."""

_WORD = 4
_UNSIGNED = {1: "uint8_t", 2: "uint16_t"}


def access_bytes(itemsize: int, batch: int) -> int:
    """Return the bytes of a wide access to a run, which its address must be a multiple of.

    That of one element where a run has but one, or less than a word.
    """
    run = batch * itemsize
    return min(WIDEST, run) if batch > 1 and run >= _WORD else itemsize


@dataclass(frozen=True, slots=True)
class ColumnRun:
    """The elements of one operand: `words` is their array in registers, `place` their pointer.

    `storage` is the type of an element in memory.
    """

    words: str
    place: str
    dtype: DType
    storage: str

    def element(self) -> str:
        """Return element k, as it is in memory."""
        size, words = self.dtype.itemsize, self.words
        if size < _WORD:
            each = _WORD // size
            return f"({self.storage})({words}[k / {each}] >> k % {each} * {8 * size})"
        bits = f"{words}[k]" if size == _WORD else f"af_long_of({words} + 2 * k)"
        if self.dtype in (DType.FLOAT32, DType.FLOAT64):
            return f"af_{self.storage}_of_bits({bits})"
        return f"({self.storage}){bits}"

    def put(self, value: str) -> str:
        """Return how element k, which nobody has put before where it is short, becomes a value."""
        size, words = self.dtype.itemsize, self.words
        if size < _WORD:
            each = _WORD // size
            own = f"(uint32_t)({_UNSIGNED[size]})({value})"
            return f"{words}[k / {each}] |= {own} << k % {each} * {8 * size};"
        is_float = self.dtype in (DType.FLOAT32, DType.FLOAT64)
        bits = f"af_bits_of_{self.storage}({value})" if is_float else f"({value})"
        if size == _WORD:
            return f"{words}[k] = {'' if is_float else '(uint32_t)'}{bits};"
        return f"af_put_long({words} + 2 * k, {'' if is_float else '(uint64_t)'}{bits});"


class RunWriter:
    """How the runs of a batch of columns are moved, all of them before the first is used.

    The text around says `here`, how many columns there are from the first on, `step` from one to
    the next, and `is_wide`: they are `batch` neighbours, and every run of them lies evenly.
    """

    def __init__(self, batch: int) -> None:
        """Move `batch` columns at a time."""
        self.batch = batch

    def arrays(self, runs: list[ColumnRun]) -> list[str]:
        """Return the words of runs, all 0."""
        return [f"uint32_t {run.words}[{self._num_words(run)}] = {{0}};" for run in runs]

    def get(self, runs: list[ColumnRun]) -> list[str]:
        """Return what loads runs; where there are no columns they stay 0."""
        wide = [f"af_get({run.words}, {run.place}, {self._size(run)});" for run in runs]
        narrow = [run.put(f"{run.place}[k * step]") for run in runs]
        return self._either(runs, wide, narrow)

    def store(self, runs: list[ColumnRun]) -> list[str]:
        """Return what stores runs."""
        wide = [f"af_put({run.place}, {run.words}, {self._size(run)});" for run in runs]
        narrow = [f"{run.place}[k * step] = {run.element()};" for run in runs]
        return self._either(runs, wide, narrow)

    def _either(self, runs: list[ColumnRun], wide: list[str], narrow: list[str]) -> list[str]:
        can = [access_bytes(run.dtype.itemsize, self.batch) > run.dtype.itemsize for run in runs]
        always = [line for line, is_one in zip(narrow, can, strict=True) if not is_one]
        text = self._each(always)
        if any(can):
            text += ["if (is_wide) {"]
            text += indented([line for line, is_one in zip(wide, can, strict=True) if is_one])
            others = [line for line, is_one in zip(narrow, can, strict=True) if is_one]
            text += ["} else {", *indented(self._each(others)), "}"]
        return text

    def _each(self, lines: list[str]) -> list[str]:
        if not lines:
            return []
        loop = f"for (int32_t k = 0; k < {self.batch}; k++) {{"
        return ["AF_UNROLL", loop, "    if (k * step < here) {", *indented(lines, 2), "    }", "}"]

    def _size(self, run: ColumnRun) -> int:
        return self.batch * run.dtype.itemsize

    def _num_words(self, run: ColumnRun) -> int:
        return max(1, self._size(run) // _WORD)
