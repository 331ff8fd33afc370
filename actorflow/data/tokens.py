"""Next-token batches from one long sequence of token ids.

An epoch cuts the sequence into windows of `seq` tokens, beginning at a random phase of the epoch,
and sees every window exactly once in a shuffled order. The phase moves the cuts, so that over the
epochs every token is predicted from every length of context. Windows of an epoch do not overlap;
`y` reaches one token past `x`. Batches run on over the end of an epoch, so no window is dropped.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from actorflow.data.arrays import EpochOrder
from actorflow.data.source import (
    Batch,
    DataError,
    content_hash,
    mend_of_array,
    plain_array,
    position_of,
    position_state,
    positive,
)
from compiler.contract.files import user_path
from compiler.contract.html_table import html_table
from compiler.contract.types import DType, TensorType

_ASCII_SIZE = 128

Errors = Literal["strict", "ignore"]


class Tokens:
    """Endless batches {"x": [batch, seq], "y": [batch, seq]}; y[i, t] is the token after x[i, t].

    The windows of batch k are a pure function of (seed, k): seeking is O(1) and a batch does not
    depend on how it was reached. The array is read in place, never copied; it must not change
    meanwhile.

    Args:
        tokens: the ids, 1-D, of any integer type; may be an `np.memmap`.
        seq: tokens in a window.
        batch: windows in a batch.
        seed: order of the windows.
        dtype: element type of x and y: np.int32 or np.int64.

    Raises:
        DataError: the array is not 1-D of integers, or too short for one batch.
    """

    item_name = "tokens"

    def __init__(
        self,
        tokens: npt.NDArray[Any],
        *,
        seq: int,
        batch: int,
        seed: int = 0,
        dtype: npt.DTypeLike = np.int32,
    ) -> None:
        self._seq, self._batch = positive("seq", seq), positive("batch", batch)
        self._tokens = _checked(tokens)
        self._num_windows, self._num_phases = _windows(len(self._tokens), self._seq, self._batch)
        self._dtype = np.dtype(dtype)
        if self._dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
            raise DataError(f"Tokens: expected dtype= np.int32 or np.int64, came {self._dtype}")
        # Where every id fits by its type, no batch has to be looked through.
        self._fits = np.can_cast(self._tokens.dtype, self._dtype)
        self._order = EpochOrder(self._num_windows, seed)
        self._seed = int(seed)
        self._batches = 0
        # One token more than a window: x and y are the same row, one token apart.
        self._rows = np.empty((self._batch, self._seq + 1), self._tokens.dtype)
        self._starts = np.empty(self._batch, np.int64)
        self._fingerprint: str | None = None

    def __repr__(self) -> str:
        return f"Tokens({len(self._tokens):,} tokens, batches of {self._batch:,} x {self._seq:,})"

    def _repr_html_(self) -> str:
        return html_table("Tokens", {"tokens": len(self._tokens), **self.spec()})

    @classmethod
    def from_text(
        cls, text: str | bytes, *, seq: int, batch: int, seed: int = 0, errors: Errors = "strict"
    ) -> Self:
        """Make a source of the characters of an ASCII text: ids 0 to 127.

        Args:
            text: the text; bytes are taken as ASCII or UTF-8.
            seq: as for the class.
            batch: as for the class.
            seed: as for the class.
            errors: "ignore" leaves out every character that is not ASCII.

        Raises:
            DataError: a character is not ASCII and `errors` is "strict", or the text is too short.
        """
        return cls(_ascii(text, errors, "text"), seq=seq, batch=batch, seed=seed)

    @classmethod
    def from_files(
        cls,
        paths: Iterable[str | os.PathLike[str]],
        *,
        seq: int,
        batch: int,
        seed: int = 0,
        errors: Errors = "strict",
    ) -> Self:
        """Make a source of the characters of text files, joined in the order given.

        Sort the paths of a glob: its order depends on the file system, and a resumed run must see
        the same bytes.

        Args:
            paths: the files, ASCII or UTF-8; or one file.
            seq: as for the class.
            batch: as for the class.
            seed: as for the class.
            errors: "ignore" leaves out every character that is not ASCII.

        Raises:
            DataError: a character is not ASCII and `errors` is "strict", or the text is too short.
            OSError: a file cannot be read.
        """
        if isinstance(paths, (str, os.PathLike)):
            paths = (paths,)
        parts = [_ascii(Path(user_path(path)).read_bytes(), errors, str(path)) for path in paths]
        tokens = np.concatenate(parts) if parts else np.empty(0, np.uint8)
        return cls(tokens, seq=seq, batch=batch, seed=seed)

    @property
    def items_per_batch(self) -> int:
        """Tokens predicted by one batch: batch * seq."""
        return self._batch * self._seq

    @property
    def batches_per_epoch(self) -> float:
        """Batches in which every window is seen once; rarely a whole number."""
        return self._num_windows / self._batch

    def passes(self, epochs: int) -> tuple[Tokens, Fraction]:
        """Return this source, which has no end, and how many batches so many passes of it are."""
        return self, Fraction(self._num_windows * epochs, self._batch)

    def spec(self) -> dict[str, TensorType]:
        """Return the types of x and y: [batch, seq]."""
        one = TensorType(DType(self._dtype.name), (self._batch, self._seq))
        return {"x": one, "y": one}

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, npt.NDArray[Any]]:
        """Return the next batch in fresh arrays; never ends."""
        shape = (self._batch, self._seq)
        out = {"x": np.empty(shape, self._dtype), "y": np.empty(shape, self._dtype)}
        self.next_into(out)
        return out

    def next_into(self, out: Batch) -> None:
        """Write the next batch into out["x"] and out["y"], of the types of `spec()`.

        Raises:
            DataError: a token id does not fit into the element type; the position is unchanged.
        """
        self.next_rows_into(out, {})

    def next_rows_into(self, out: Batch, rows: Mapping[str, slice]) -> None:
        """Write some rows of the next batch; of x or y without a slice, all. Reads no others.

        Raises:
            DataError: a token id that is read does not fit into the element type; the position is
                unchanged.
        """
        whole, width = slice(0, self._batch), self._seq + 1
        x, y = rows.get("x", whole), rows.get("y", whole)
        first, last = min(x.start, y.start), max(x.stop, y.stop)
        self._find_starts()
        windows = self._rows[: last - first]
        # Slices copy each window at once; an index array of all positions would take 8 bytes a
        # token.
        for row, start in zip(windows, self._starts[first:last].tolist(), strict=True):
            row[:] = self._tokens[start : start + width]
        if not self._fits:
            self._check_range(windows)
        out["x"][...] = windows[x.start - first : x.stop - first, :-1]
        out["y"][...] = windows[y.start - first : y.stop - first, 1:]
        self._batches += 1

    def _find_starts(self) -> None:
        epoch, position = divmod(self._batches * self._batch, self._num_windows)
        filled = 0
        while filled < self._batch:
            count = min(self._batch - filled, self._num_windows - position)
            starts = self._order.items(epoch, position, count) * self._seq
            # One phase for all windows of an epoch, so they do not overlap.
            starts += self._order.draw(epoch, self._num_phases)
            self._starts[filled : filled + count] = starts
            filled, epoch, position = filled + count, epoch + 1, 0

    def _check_range(self, ids: npt.NDArray[Any]) -> None:
        limits = np.iinfo(self._dtype)
        low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
        if low < limits.min or high > limits.max:
            wrong = low if low < limits.min else high
            raise DataError(
                f"Tokens: expected ids that fit into {self._dtype.name}, came {wrong}; clean the"
                " data, or give Tokens(..., dtype=np.int64)"
            )

    def state(self) -> dict[str, Any]:
        """Return the number of batches returned so far."""
        return position_state("tokens", self._batches)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches counted in `state`; O(1).

        Raises:
            DataError: the state is of another kind of source, or damaged.
        """
        self._batches = position_of(state, "tokens")

    def fingerprint(self) -> str:
        """Return length, content hash and parameters; reads all tokens the first time."""
        if self._fingerprint is None:
            self._fingerprint = (
                f"tokens:{len(self._tokens)}:{content_hash(self._tokens)}:seq={self._seq}"
                f",batch={self._batch},seed={self._seed},dtype={self._dtype.name}"
            )
        return self._fingerprint


def _checked(given: object) -> npt.NDArray[Any]:
    tokens = plain_array(given)
    if tokens is None:
        raise DataError(
            f"Tokens: expected a 1-D numpy array of integers, came {type(given).__name__};"
            f" for text use Tokens.from_text, else {mend_of_array(given)}"
        )
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        shape = ", ".join(map(str, tokens.shape))
        raise DataError(
            f"Tokens: expected a 1-D array of integers, came {tokens.dtype.name}[{shape}];"
            " flatten it with tokens.reshape(-1), convert it with tokens.astype(np.int32)"
        )
    return tokens


def _windows(num_tokens: int, seq: int, batch: int) -> tuple[int, int]:
    """Return (windows of an epoch, phases to draw from).

    All `seq` phases are possible if one window less is cut; short data gives up phases first, since
    one batch must be possible whenever the tokens for it are there.

    Raises:
        DataError: not even one batch can be cut.
    """
    num_windows = (num_tokens - seq) // seq
    if num_windows < batch:
        num_windows = (num_tokens - 1) // seq
    if num_windows < batch:
        raise DataError(
            f"Tokens: one batch of {batch} windows of {seq} tokens needs {batch * seq + 1:,} tokens"
            f" (batch * seq + 1), and the data has {num_tokens:,}; give more data, or a smaller"
            f" {_smaller(num_tokens, seq)}"
        )
    return num_windows, min(seq, num_tokens - num_windows * seq)


def _smaller(num_tokens: int, seq: int) -> str:
    most = max(0, (num_tokens - 1) // seq)
    if most:
        return f"batch= or seq= (with seq={seq}, batch= can be at most {most})"
    return f"seq= (one window of seq={seq} alone needs {seq + 1:,} tokens)"


def _ascii(text: str | bytes, errors: str, where: str) -> npt.NDArray[np.uint8]:
    if errors not in ("strict", "ignore"):
        raise DataError(f"Tokens: expected errors= 'strict' or 'ignore', came {errors!r}")
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    codes = np.frombuffer(raw, np.uint8)
    foreign = codes >= _ASCII_SIZE
    if not foreign.any():
        return codes
    if errors == "ignore":
        return codes[~foreign]
    offset = int(foreign.argmax())
    raise DataError(
        f"Tokens: expected ASCII in {where}, came byte 0x{codes[offset]:02x} at offset {offset:,}"
        f" ({int(foreign.sum()):,} such bytes); leave them out with errors='ignore', or give"
        " Tokens the UTF-8 bytes themselves: np.frombuffer(data, np.uint8), ids 0 to 255"
    )
