"""Which library multiplies fastest, per shape: a fixed rule, or a table that is measured once.

The table is one JSON file per machine: its name has all that the numbers depend on (compiler,
processor, threads, versions of the libraries). A product that is not in it is measured when it is
first asked for, under our pool, on random numbers, the candidates in turns; what was found is
kept. A file that is damaged counts as empty, which a line says.

State of the module, and why: the table belongs to the process, for every job of it must be given
the same answer. Until `configure` says otherwise the rule is fixed and nothing is measured.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np

from actors.kernels.common.files import DamagedFile, read_object, replace_object, report_damage
from actors.kernels.common.gemm import MIN_ROWS, Gemm, Side, chunks_of
from actors.kernels.library import onednn, openblas, runtime
from actors.kernels.library.gemm_launch import (
    FewRows,
    Library,
    OpenBlas,
    Small,
    gemm_launch,
    workspace_bytes,
)
from actors.kernels.library.launch import NativeLaunch
from actors.machine.errors import forkable_lock
from actors.machine.protocol import Array
from compiler.contract.codec import Bounds, Text
from compiler.contract.types import DType

BUDGET_NS = 5_000_000
"""What a candidate that is near the best may take; it is run five times in any case."""

RULE_SMALL_FLOPS = 2 * 32**3
RULE_SMALL_COLUMNS = 16
"""Up to this many per matrix, or so few columns, the fixed rule takes the small product."""

RULE_FEW_ROWS = 4
"""Up to this many rows it takes the product that reads b once."""

RULE_CHUNKS = 8
"""With fewer chunks of whole rows the fixed rule takes tiles."""

FEW_CHUNKS_ROWS = 2 * MIN_ROWS
"""Up to this many rows there are at most two chunks of whole ones."""

_MIN_ROUNDS, _MAX_ROUNDS = 3, 50
_TURN_NS = 100_000
"""What launches that are timed together take, about; a longer one is timed alone."""

_LEAST_AT_ONCE = 4
"""Of short launches at least so many: the first may still find threads of the pool asleep."""

_FAR, _EVEN = 1.15, 1.03
_DISTURBED = 50
"""The part of a launch for which its threads may have waited, all in all."""

_MAX_ELEMENTS = 1 << 28
"""A product with a larger operand is not measured: the rule decides."""

_RANDOM = 65_521
"""Random numbers of an operand, repeated; a prime, so that rows are unlike each other."""

_FORMAT = "8"


@dataclass(frozen=True, slots=True)
class Options:
    """Where the table is kept (None: in this process alone), and whether anything is measured."""

    folder: Path | None = None
    deterministic: bool = True


@dataclass(frozen=True, slots=True)
class ProductTable:
    """The content of the file: the library of each product, by its key."""

    epoch: Annotated[int, Bounds(0, 1 << 62)]
    products: Mapping[Text, Text]


@dataclass(slots=True)
class _TuningState:
    options: Options = field(default_factory=Options)
    file: Path | None = None
    table: dict[str, str] | None = None
    epoch: int = 0
    chosen: dict[tuple[Gemm, bool], str | None] = field(default_factory=dict)
    num_measured: int = 0
    told: set[Path] = field(default_factory=set)


_state = _TuningState()
_lock = forkable_lock()


def configure(folder: Path | None, deterministic: bool) -> None:
    """Set the table's folder, and whether the fixed rule is used instead of the table."""
    with _lock:
        if folder != _state.options.folder:
            _state.table = None
        _state.options = Options(folder, deterministic)
        _state.chosen.clear()


def retune() -> None:
    """Forget what was measured: every shape is measured anew when it is next asked for."""
    with _lock:
        _load()
        _state.table = {}
        _state.chosen.clear()
        _state.epoch += 1
        _keep()


def epoch() -> str:
    """Return what choices depend on besides the machine: it changes with every `retune`."""
    with _lock:
        if _state.options.deterministic:
            return "rule"
        _load()
        return f"table-{_state.epoch}"


def num_measured() -> int:
    """Return of how many products this process has measured which library is the fastest."""
    return _state.num_measured


def library_for(
    gemm: Gemm, libraries: Sequence[Library], *, has_epilogue: bool = False
) -> str | None:
    """Return the name of the library that is to compute a product; None when none takes it.

    With an epilogue those that cut across rows are asked up to `FEW_CHUNKS_ROWS` alone: with more
    rows there are chunks enough of whole ones, which are in cache when it reads them.
    """
    with _lock:
        # Asked once per process and shape: plans compiled later get the answer of the first.
        if (gemm, has_epilogue) not in _state.chosen:
            are_all = not has_epilogue or gemm.m <= FEW_CHUNKS_ROWS
            eligible = [x for x in libraries if are_all or x.cut.has_whole_rows]
            candidates = _distinct(gemm, eligible)
            # Up to so many rows the best is that of the product alone.
            key = gemm.key if are_all else f"{gemm.key} in rows"
            _state.chosen[gemm, has_epilogue] = _best(gemm, candidates, key) if candidates else None
        return _state.chosen[gemm, has_epilogue]


def _best(gemm: Gemm, taken: Sequence[Library], key: str) -> str:
    if len(taken) == 1:
        return taken[0].name
    if _state.options.deterministic or _largest(gemm) > _MAX_ELEMENTS:
        return _rule(gemm, taken)
    table = _load()
    # The table may name a library that is not here any more, or does not take this product.
    if table.get(key) not in [library.name for library in taken]:
        fastest = _measured(gemm, taken)
        _save(key, fastest, [library.name for library in taken])
        table = _load()
    return table[key]


def _distinct(gemm: Gemm, libraries: Sequence[Library]) -> list[Library]:
    """Return the libraries that take a product; of two that cut it alike, the first."""
    candidates: dict[object, Library] = {}
    for library in libraries:
        if workspace_bytes(library, gemm) is not None:
            chunks = chunks_of(gemm, library.cut)
            # One library with two cuts that lead to the same chunks is one candidate.
            base_name = library.name.removesuffix(f".{library.cut.value}")
            candidates.setdefault((base_name, chunks), library)
    return list(candidates.values())


def _rule(gemm: Gemm, libraries: Sequence[Library]) -> str:
    """Return the small product, or the first library; in tiles where whole rows give few chunks.

    A single column is for OpenBLAS, which has a product of a matrix and a vector.
    """
    first, *others = libraries
    if gemm.n == 1:
        return next((x.name for x in libraries if isinstance(x, OpenBlas)), first.name)
    few = next((x.name for x in libraries if isinstance(x, FewRows)), None)
    if few is not None and gemm.m <= RULE_FEW_ROWS:
        return few
    small = next((library for library in others if isinstance(library, Small)), None)
    is_tiny = 2 * gemm.m * gemm.n * gemm.k <= RULE_SMALL_FLOPS
    if small is not None and (is_tiny or gemm.n <= RULE_SMALL_COLUMNS):
        return small.name
    if len(chunks_of(gemm, first.cut)) < RULE_CHUNKS:
        return next((x.name for x in others if type(x) is type(first)), first.name)
    return first.name


def _measured(gemm: Gemm, libraries: Sequence[Library]) -> str:
    """Return the library with the fastest of several rounds, in which all of them take turns.

    The fastest, not the median: what other processes do on the machine only adds. A library that is
    far behind after two takes no part in the others; of those that come out even the first wins.
    """
    _state.num_measured += 1
    # A fixed seed: each candidate and process measures the same numbers.
    rng = np.random.default_rng(0)
    arrays = (
        _array(rng, gemm.dtype, gemm.a, (gemm.m, gemm.k), gemm.batch),
        _array(rng, gemm.dtype, gemm.b, (gemm.k, gemm.n), gemm.batch),
        _array(rng, gemm.out_dtype, gemm.out, (gemm.m, gemm.n), gemm.batch),
    )
    launches = [
        gemm_launch(library, gemm, arrays, _workspace(workspace_bytes(library, gemm)))
        for library in libraries
    ]
    workers = [
        min(runtime.num_threads(), len(chunks_of(gemm, library.cut))) for library in libraries
    ]
    first: list[int] = []
    for launch, count in zip(launches, workers, strict=True):
        # The first run of a launch meets cold caches and pages that were never touched.
        once = _duration_ns(launch, count)
        first.append(min(once, _duration_ns(launch, count, _num_at_once(once))))
    # Candidates that are 15 % behind after two runs take no part in the rounds.
    near = [index for index, time_ns in enumerate(first) if time_ns <= _FAR * min(first)]
    times = {index: first[index] for index in near}
    num_launches = _num_at_once(min(first))
    for _ in range(_rounds(min(first) * num_launches) if len(near) > 1 else 0):
        for index in near:
            duration_ns = _duration_ns(launches[index], workers[index], num_launches)
            times[index] = min(times[index], duration_ns)
    best = min(times.values())
    # Within 3 % the first wins, so that noise does not decide which bits a product has.
    return next(libraries[index].name for index in near if times[index] <= _EVEN * best)


def _rounds(duration_ns: int) -> int:
    return max(_MIN_ROUNDS, min(_MAX_ROUNDS, BUDGET_NS // max(1, duration_ns)))


def _num_at_once(duration_ns: int) -> int:
    """Return how many launches of this duration, maybe with waking the pool, are timed together."""
    return max(1 if duration_ns > 2 * _TURN_NS else _LEAST_AT_ONCE, _TURN_NS // max(1, duration_ns))


def _duration_ns(launch: NativeLaunch, workers: int, num_launches: int = 1) -> int:
    """Return how long a launch takes; where threads had to wait for a core, how long it would.

    Of several launches it is the mean, after one that wakes the pool: between two turns its threads
    fall asleep, which they do not between the launches of a step, and waking them takes as long as
    a small product.
    """
    waited = _waited_ns()
    if num_launches > 1:
        launch()
    busy, begin = time.process_time_ns(), time.perf_counter_ns()
    for _ in range(num_launches):
        launch()
    duration, busy = time.perf_counter_ns() - begin, time.process_time_ns() - busy
    return undisturbed_ns(duration, busy, _waited_ns() - waited, workers) // num_launches


def undisturbed_ns(duration_ns: int, busy_ns: int, waited_ns: int, workers: int) -> int:
    """Return what launches on some threads take, less what these waited for a core.

    That is their processor time, evenly shared, but no less than what is left without all waits.
    While another program runs, a product in two halves ends with the slower one, and looks twice as
    slow as one in chunks of which a free thread takes more: such a choice would stay for as long as
    the table. The processor time alone is not it: the system adds that of a thread on another core
    at its next tick, so that of two threads half may be missing.
    """
    if waited_ns <= duration_ns // _DISTURBED:
        return duration_ns
    return min(duration_ns, max(busy_ns // workers, duration_ns - waited_ns))


def _waited_ns() -> int:
    """Return how long the threads of this process stood in line for a core; 0 if unknown."""
    total = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread that has just ended
            # schedstat: time on a core, time in the queue, number of slices; in nanoseconds.
            total += int(thread.read_text(encoding="ascii").split()[1])
    return total


def _array(
    rng: np.random.Generator,
    dtype: DType,
    side: Side,
    extents: tuple[int, int],
    batch: tuple[int, ...],
) -> Array:
    """Return random elements with the strides of a side; the launch reads no more than these."""
    size = _span(side, extents, batch)
    if dtype is DType.FLOAT64:
        return np.resize(rng.standard_normal(_RANDOM), size)
    values = np.resize(rng.standard_normal(_RANDOM, np.float32), size)
    if dtype is DType.BFLOAT16:
        # The upper half of a float32 is a bfloat16, cut off rather than rounded.
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values


def _span(side: Side, extents: tuple[int, int], batch: tuple[int, ...]) -> int:
    """Return how far the last element of a side is from the first, and one."""
    places = zip(batch, side.batch, strict=True)
    steps = ((extents[0], side.row), (extents[1], side.column), *places)
    return 1 + sum([(extent - 1) * abs(step) for extent, step in steps])


def _largest(gemm: Gemm) -> int:
    sides = ((gemm.a, (gemm.m, gemm.k)), (gemm.b, (gemm.k, gemm.n)), (gemm.out, (gemm.m, gemm.n)))
    return max([_span(side, extents, gemm.batch) for side, extents in sides])


def _workspace(size: int | None) -> Array | None:
    if not size:
        return None
    raw = np.empty(size + 64, np.uint8)
    # To a cache line, as scratch of a plan is aligned.
    start = -int(raw.__array_interface__["data"][0]) % 64
    return raw[start : start + size]


def _load() -> dict[str, str]:
    """Return the table, read from its file when it is first asked for."""
    file = _file()
    if _state.table is None or file != _state.file:
        _state.file = file
        _state.epoch, _state.table = (0, {}) if file is None else _read(file)
    return _state.table


def _file() -> Path | None:
    if _state.options.folder is None:
        return None
    blas = openblas.numpy_openblas()
    parts = (_FORMAT, runtime.fingerprint(), onednn.fingerprint(), blas.library if blas else "")
    mark = hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()
    return _state.options.folder / f"tuning-{mark}.json"


def _read(file: Path) -> tuple[int, dict[str, str]]:
    try:
        table = read_object(file, ProductTable)
        return (0, {}) if table is None else (table.epoch, dict(table.products))
    except DamagedFile as error:
        if file not in _state.told:
            _state.told.add(file)
            report_damage(file, error, "matrix products are measured again")
        return 0, {}


def _save(key: str, name: str, names: Sequence[str]) -> None:
    """Add a product to table and file, unless another process of this epoch was the first.

    Its answer is taken over if it is one of `names`: processes agree, and so do their bits.
    """
    _state.table = {**_load(), key: name}
    if _state.file is not None:
        epoch, others = _read(_state.file)
        # A table of before a `retune` elsewhere, or of after it, is not mixed with ours.
        if epoch == _state.epoch:
            _state.table |= others
    if _state.table[key] not in names:
        _state.table[key] = name
    _keep()


def _keep() -> None:
    """Replace the file by the table; or do without."""
    if _state.file is None or _state.table is None:
        return
    with contextlib.suppress(OSError):  # a folder that cannot be written costs a measurement
        replace_object(_state.file, ProductTable(_state.epoch, _state.table))
