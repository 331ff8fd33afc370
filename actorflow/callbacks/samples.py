"""A few rows of a batch in the folder of a run, as images and texts, for `actorflow report`.

    af.callbacks.ReportSamples(next(iter(data)), decode={"ids": tokenizer.decode})

The file has pixels and texts, and no files of a format that whoever shows them would have to trust.
It is small whatever the rows are: images are thinned out, texts cut, old rows dropped.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from actorflow.callbacks.protocol import Results, StartedRun
from actorflow.environment.settings import logger
from actorflow.tensor.literals import checked_size
from actorflow.tensor.tracer import find_source
from compiler.contract.codec import Bounds, DecodeError, Text, from_json, from_object, to_json
from compiler.contract.codec import to_object as plain_of
from compiler.contract.errors import CompileError
from compiler.contract.files import read_regular, replace_regular

Array = np.ndarray[Any, Any]
Rows = Mapping[str, Any]
"""Arrays or lists with a row of a batch each, by name."""

SAMPLES_FILE = "samples.json"
MOST_PIXELS = 96
"""Of a side of an image; of a larger one every n-th pixel is kept."""
_MOST_BYTES = 4 << 20
_MOST_SETS = 4
"""Of which the newest are kept."""
_MOST_ROWS, _MOST_NAMES, _MOST_TEXT, _MOST_NUMBERS = 32, 16, 2_000, 16

Side = Annotated[int, Bounds(1, MOST_PIXELS)]


@dataclass(frozen=True, slots=True)
class SampleValue:
    """What a row has under a name: a text, and `pixels` [height, width, 1 or 3] in base64."""

    name: Text
    text: Text = ""
    pixels: Text = ""
    shape: tuple[Side, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleSet:
    """Rows as they were after a step."""

    step: Annotated[int, Bounds(0, (1 << 63) - 1)]
    rows: tuple[tuple[SampleValue, ...], ...]


@dataclass(frozen=True, slots=True)
class _SampleFile:
    sets: tuple[SampleSet, ...]


def read_samples(folder: str | os.PathLike[str]) -> tuple[SampleSet, ...]:
    """Return what the folder of a run has of rows, none without its file. Raises OSError."""
    path = Path(folder) / SAMPLES_FILE
    try:
        return from_object(_SampleFile, from_json(read_regular(path, _MOST_BYTES))).sets
    except FileNotFoundError:
        return ()
    except DecodeError as error:
        raise OSError(0, f"it is damaged or of another version ({error})", str(path)) from None


class ReportSamples:
    """Keeps a few rows in the folder of a run, which `actorflow report` and `serve` show.

        samples = af.callbacks.ReportSamples(next(iter(data)))
        train.fit(..., checkpoint="runs/a", callbacks=[samples])

    Rows of uint8 [height, width], and of uint8 or floats with one or three channels, first or last,
    are images; floats beyond [0, 1] are scaled from the least to the largest. Texts and up to 16
    numbers are shown as they are, of other arrays type and range.

    Args:
        rows: a batch, by name; or a function that returns one, which is called at the start and
            after each evaluation, as for what a model generates.
        count: how many rows are kept of it, up to 32.
        decode: by name, what makes a text or an image of a row, such as `tokenizer.decode`.

    Raises CompileError with the user's line.
    """

    def __init__(
        self,
        rows: Rows | Callable[[], Rows],
        count: int = 8,
        decode: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> None:
        self._where = find_source()
        self._rows, self._decode = rows, dict(decode or {})
        self._count = checked_size(count, "count")
        if not (callable(rows) or isinstance(rows, Mapping)) or not 1 <= count <= _MOST_ROWS:
            raise CompileError(
                f"{self._where}: ReportSamples takes a batch as a dict, or a function that returns"
                f" one, and count= of 1 to {_MOST_ROWS}; got {type(rows).__name__} and {count}"
            )
        self._sets: list[SampleSet] = []
        self._path = Path()

    def on_start(self, run: StartedRun) -> None:
        """Write the rows. Raises CompileError for a run without a folder."""
        if run.directory is None:
            raise CompileError(
                f"{self._where}: ReportSamples writes into the folder of a run, and this one has"
                " none; give fit checkpoint="
            )
        self._path = run.directory / SAMPLES_FILE
        try:
            self._sets = [s for s in read_samples(run.directory) if s.step < run.first_step]
        except OSError as error:
            logger.warning("%s: %s; it is written anew", self._path, error.strerror)
            self._sets = []
        self._write(run.first_step)

    def on_evaluation(self, step: int, means: Results) -> None:
        """Write the rows that there are by now."""
        if callable(self._rows):
            self._write(step)

    def _write(self, step: int) -> None:
        rows = self._rows() if callable(self._rows) else self._rows
        if not isinstance(rows, Mapping):
            raise CompileError(
                f"{self._where}: the function of ReportSamples is to return arrays by name, came"
                f" {type(rows).__name__}"
            )
        fields = [*rows.items()][:_MOST_NAMES]
        count = min([len(values) for _, values in fields], default=0)
        shown = [
            tuple([self._shown(name, values[row]) for name, values in fields])
            for row in range(min(count, self._count))
        ]
        sets = [*self._sets, SampleSet(step, tuple(shown))][-_MOST_SETS:]
        while len(content := to_json(plain_of(_SampleFile(tuple(sets))))) > _MOST_BYTES:
            # Older rows go first, then those at the end.
            newest = sets[-1]
            few = replace(newest, rows=newest.rows[: len(newest.rows) // 2])
            sets = sets[1:] or [few]
        self._sets = sets
        try:
            replace_regular(self._path, content)
        except OSError as error:  # no reason to end a training
            logger.warning("%s cannot be written (%s)", self._path, error.strerror)

    def _shown(self, name: str, value: Any) -> SampleValue:
        decode = self._decode.get(name)
        value = value if decode is None else decode(value)
        if isinstance(value, str):
            return SampleValue(name, value[:_MOST_TEXT])
        array = np.asarray(value)
        if array.dtype.kind not in "fiub":
            return SampleValue(name, str(value)[:_MOST_TEXT])
        pixels, about = _pixels(array)
        if pixels is not None:
            encoded = base64.b64encode(pixels.tobytes()).decode()
            return SampleValue(name, about, encoded, pixels.shape)
        if array.size <= _MOST_NUMBERS:
            return SampleValue(name, " ".join([f"{number:.6g}" for number in array.flat]))
        return SampleValue(name, f"{array.dtype}{list(array.shape)}, {_range_of(array)}")


def _range_of(array: Array) -> str:
    return f"{array.min():.4g} to {array.max():.4g}"


def _pixels(array: Array) -> tuple[Array | None, str]:
    """Return uint8 [height, width, channels] of an image, None of others, and what was scaled."""
    is_bytes = array.dtype == np.uint8
    if array.ndim == 2 and is_bytes:
        array = array[..., None]
    elif array.ndim != 3 or not (is_bytes or array.dtype.kind == "f"):
        return None, ""
    elif array.shape[2] not in (1, 3):
        array = np.moveaxis(array, 0, 2)
    if array.shape[2] not in (1, 3) or not array.size:
        return None, ""
    every = -(-max(array.shape[:2]) // MOST_PIXELS)
    array, about = array[::every, ::every], ""
    if not is_bytes:
        floats = np.nan_to_num(array.astype(np.float64), posinf=0.0, neginf=0.0)
        low, high = float(floats.min()), float(floats.max())
        if low < 0.0 or high > 1.0:
            floats, about = (floats - low) / max(high - low, 1e-30), _range_of(array)
        array = np.rint(floats * 255).astype(np.uint8)
    return array, about


def pixels_of(value: SampleValue) -> Array | None:
    """Return the image of a value that was read, None where it has none or is not as it says."""
    shape: Sequence[int] = value.shape
    try:
        content = base64.b64decode(value.pixels, validate=True)
    except ValueError:
        return None
    if len(shape) != 3 or shape[2] not in (1, 3) or len(content) != np.prod(shape):
        return None
    return np.frombuffer(content, np.uint8).reshape(shape)
