"""What one thread of this machine needs in C, and what all of them gain: measured in seconds.

Of the samples of a probe the median counts: a chain takes the sum of what its launches usually
take. The least of each is 1 to 10 % shorter, most where threads meet at the end of a launch, and no
step is ever as fast as their sum. All probes are visited several times, and of the visits the least
counts: what others do on the machine only adds, for seconds, and rarely meets a probe each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median

import numpy as np

from actors.kernels.common.attention_blocks import extents_of
from actors.kernels.common.cost import (
    ATTENTION_ROWS,
    ATTENTION_WIDTHS,
    C_DISTANCES_BYTES,
    C_EXTENTS,
    CRates,
)
from actors.kernels.common.gemm import Chunk, ProductCall, ThreadCut, gemm_of, view_of_array
from actors.kernels.common.kernel import (
    Attrs,
    BytePass,
    CWork,
    MatrixProduct,
    Operand,
    Operands,
    SelectableKernel,
)
from actors.kernels.host import catalogue
from actors.kernels.library import runtime
from actors.kernels.library.gemm_launch import Library, OpenBlas, PackedPlace, Small
from actors.kernels.library.gemm_onednn import OneDnn
from actors.kernels.library.launch import NativeChain, NativeLaunch
from actors.kernels.native.attention import in_c
from actors.machine.protocol import Array, Clock
from compiler.contract.program import FusedProgram, Instruction, Kind, ProgramInput
from compiler.contract.types import DType, TensorType, contiguous_strides, numpy_dtype

# A *probe* is a launch in C, with the work that it does, whose time reveals a rate of this machine.
# It is bound anew each time it is measured, on one thread or on all of them, on numbers of its own.
# Most of them only make sense in pairs: what five exponentials take more than one is four of them,
# whatever else a launch does.

_ALIGNMENT_BYTES = 64
_SMALL_PRIME = 251
_HEADS, _HEADS_ELEMENTS = 4, 1 << 17


@dataclass(frozen=True, slots=True)
class CProbe:
    """A launch to be timed: what it does, how it is made, and on how many threads it runs.

    `touched_bytes` is what it reads and writes each time it runs, where that leaves the caches.
    `before` is what one thread does first, so long that the others sleep.
    """

    work: CWork
    make: Callable[[], NativeLaunch]
    on_all_threads: bool = False
    touched_bytes: float = 0.0
    before: CWork | None = None


def program(
    op: str,
    times: int,
    elements: int,
    *,
    pieces: int = 1,
    on_all_threads: bool = False,
    leaves_caches: bool = False,
) -> CProbe:
    """Return an instruction over a vector, several times in a row."""
    one, x = ProgramInput(DType.FLOAT32, Kind.SCALAR), ProgramInput(DType.FLOAT32, Kind.FULL)
    is_binary = op in ("add", "div")
    steps = tuple(
        [
            Instruction(op, (1 + n if n else 0, 1) if is_binary else (n + (n > 0),),
                        DType.FLOAT32, Kind.FULL)
            for n in range(times)
        ]
    )  # fmt: skip
    fused = FusedProgram((x, one), steps, (1 + times,))
    size = 4.0 * elements
    sort = _SORTS.get(op, BytePass.PLAIN)
    work = CWork(((BytePass.SIMPLE, 2 * size), (sort, times * size)), pieces=pieces)
    operands = ((_dense(1, elements), _dense(1, 1)), (_dense(1, elements),))
    attrs: Attrs = {"program": fused, "rows": 1, "columns": elements}
    touched = 2 * size if leaves_caches else 0.0
    return CProbe(work, lambda: bound("c.fused", attrs, *operands), on_all_threads, touched)


def after(first: CProbe, second: CProbe) -> CProbe:
    """Return the one launch on one thread, and then the other."""

    def make() -> NativeLaunch:
        # Bound in here, the launch keeps one worker wherever it runs.
        with runtime.as_one_thread():
            alone = first.make()
        joined = NativeChain((alone, second.make()))
        return NativeLaunch(runtime.chain_runner(), joined.address, (joined,))

    return CProbe(second.work, make, second.on_all_threads, before=first.work)


_SORTS = {
    "div": BytePass.DIVIDE,
    "sqrt": BytePass.ROOT,
    "exp": BytePass.EXP,
    "tanh": BytePass.TANH,
    "sin": BytePass.POWER,
}
"""What stands for each sort of instruction, in C."""

INSTRUCTIONS = {"add": 32, "div": 4, "sqrt": 4, "exp": 1, "tanh": 1, "sin": 1}
"""How often each is done in a row, so that it takes longer than moving the operands."""


def row_sums(rows: int, columns: int) -> CProbe:
    """Return the sums of rows."""
    x = ProgramInput(DType.FLOAT32, Kind.FULL)
    steps = (Instruction("row_sum", (0,), DType.FLOAT32, Kind.ROW),)
    attrs: Attrs = {"program": FusedProgram((x,), steps, (1,)), "rows": rows, "columns": columns}
    size = 4.0 * rows * columns
    work = CWork(((BytePass.SIMPLE, size), (BytePass.REDUCE, size)))  # one walk alone
    return CProbe(
        work, lambda: bound("c.fused", attrs, (_dense(rows, columns),), (_dense(rows, 1),))
    )


def random_bits(elements: int) -> CProbe:
    """Return what dropout asks for."""
    seed = ProgramInput(DType.INT64, Kind.SCALAR)
    steps = (Instruction("philox", (0, 1), DType.BOOL, Kind.FULL, (1, 0.1)),)
    attrs: Attrs = {
        "program": FusedProgram((seed, seed), steps, (2,)), "rows": 1, "columns": elements,
    }  # fmt: skip
    work = CWork(((BytePass.SIMPLE, float(elements)), (BytePass.RANDOM, 4.0 * elements)))
    state, out = _dense(dtype=DType.INT64), _dense(1, elements, dtype=DType.BOOL)
    return CProbe(work, lambda: bound("c.fused", attrs, (state, state), (out,)))


def moved(side: int) -> CProbe:
    """Return a copy of a transposed matrix."""
    matrix = _dense(side, side)
    across = Operand(matrix.type, 0, matrix.strides_bytes[::-1])
    work = CWork(((BytePass.STRIDED, 8.0 * side * side),))
    return CProbe(work, lambda: bound("c.copy", {}, (across,), (matrix,)))


def taken(count: int, width: int) -> CProbe:
    """Return rows that are taken by their numbers."""
    table, ids, out = _dense(256, width), _dense(count, dtype=DType.INT32), _dense(count, width)
    work = CWork(((BytePass.GATHER, 4.0 * count * width),))
    return CProbe(work, lambda: bound("c.embedding", {}, (table, ids), (out,)))


def added(count: int, width: int) -> CProbe:
    """Return rows that are added by their numbers."""
    table, ids, rows = _dense(256, width), _dense(count, dtype=DType.INT32), _dense(count, width)
    work = CWork(((BytePass.SCATTER, 4.0 * count * width),))
    attrs: Attrs = {"rows": 256}
    return CProbe(work, lambda: bound("c.embedding_grad", attrs, (rows, ids), (table,)))


def product_probe(library: Library, m: int, n: int, k: int) -> CProbe:
    """Return one call of a library, uncut."""
    work = CWork(products=(MatrixProduct(1, m, n, k),))
    return CProbe(work, lambda: _called(library, m, n, k))


def shared_product(side: int, *, on_all_threads: bool) -> CProbe:
    """Return a product that threads share in whole rows."""
    m = 8 * 64
    item = MatrixProduct(8, 64, side, side)
    x, weights, out = _dense(m, side), _dense(side, side), _dense(m, side)
    work = CWork(products=(item,), pieces=8)
    name = "onednn.rows.matmul"
    return CProbe(work, lambda: bound(name, {}, (x, weights), (out,)), on_all_threads)


def attention(rows: int, width: int, *, is_forward: bool) -> CProbe:
    """Return causal attention of heads that lie beside each other, as a layer makes them.

    There are so many batches of them that they lie beyond the first-level cache.
    """
    batch = max(1, _HEADS_ELEMENTS // (_HEADS * rows * width))
    shape, row = (batch, _HEADS, rows, width), _dense(batch, _HEADS, rows)
    q, y = [_beside(shape, parts) for parts in (3, 1)]
    attrs: Attrs = {"scale": 0.125, "causal": True}
    e = extents_of(attrs, (q, q, q))
    work = replace(in_c(e, is_forward=is_forward), pieces=1)
    if is_forward:
        return CProbe(work, lambda: bound("c.attention", attrs, (q, q, q), (y, row)))
    operands = (y, q, q, q, y, row)
    return CProbe(work, lambda: bound("c.attention_grad", attrs, operands, (q, q, q)))


def _beside(shape: tuple[int, int, int, int], parts: int) -> Operand:
    """Return one of so many parts that share rows: queries, keys and values come as one matrix."""
    _, heads, rows, width = shape
    step = 4 * parts * heads * width
    return Operand(TensorType(DType.FLOAT32, shape), 0, (step * rows, 4 * width, step, 4))


def bound(kernel: str, attrs: Attrs, inputs: Operands, outputs: Operands) -> NativeLaunch:
    """Return the launch of a kernel on numbers of its own. Raises LookupError: it takes no such."""
    entry = catalogue.kernels_by_name()[kernel]
    ask = entry.needs if isinstance(entry, SelectableKernel) else entry.query
    needs = ask(attrs, inputs, outputs)
    if needs is None:
        raise LookupError(f"kernel {kernel!r} does not take what it is probed with")
    arrays = [_filled(operand) for operand in (*inputs, *outputs)]
    workspace = _aligned(needs.workspace_bytes)
    count = len(inputs)
    launch = entry.bind(attrs, tuple(arrays[:count]), tuple(arrays[count:]), workspace)
    if not isinstance(launch, NativeLaunch):
        raise LookupError(f"kernel {kernel!r} is not made in C")
    return launch


def _called(library: Library, m: int, n: int, k: int) -> NativeLaunch:
    arrays = (_filled(_dense(m, k)), _filled(_dense(k, n)), _filled(_dense(m, n)))
    views = [view_of_array(array) for array in arrays]
    a, b, out = [view for view in views if view is not None]
    gemm = gemm_of(a, b, out)
    chunks = (Chunk((ProductCall(0, m, n, 0, 0, 0),), 0, m),)
    scratch = None if gemm is None else library.scratch(gemm, chunks)
    if gemm is None or scratch is None or gemm.is_swapped:
        raise LookupError(f"{library.name} does not take a product [{m}, {k}] [{k}, {n}]")
    place = PackedPlace(_aligned(scratch.size_bytes(1)), scratch, 1, None)
    return library.launch(gemm, chunks, arrays, place)


def is_taken(probe: CProbe) -> bool:
    """Whether there is a kernel for a probe here."""
    try:
        with runtime.as_one_thread():
            probe.make()
    except LookupError:
        return False
    return True


def _dense(*shape: int, dtype: DType = DType.FLOAT32) -> Operand:
    itemsize = numpy_dtype(dtype).itemsize
    return Operand(TensorType(dtype, shape), 0, contiguous_strides(shape, itemsize))


def _aligned(size_bytes: int) -> Array | None:
    if not size_bytes:
        return None
    raw = np.zeros(size_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -int(raw.__array_interface__["data"][0]) % _ALIGNMENT_BYTES
    return raw[start : start + size_bytes]


def _filled(operand: Operand) -> Array:
    """Return an array of small varied numbers; integers are indices below 256."""
    pattern = (np.arange(_SMALL_PRIME) * 37 % _SMALL_PRIME).astype(operand.dtype)
    if operand.type.dtype.is_float:
        pattern = pattern / _SMALL_PRIME + 0.5
    pattern = pattern.astype(operand.dtype)
    steps = zip(operand.shape, operand.strides_bytes, strict=True)
    span = 1 + sum([(extent - 1) * step for extent, step in steps]) // pattern.itemsize
    buffer = np.resize(pattern, span)
    return np.lib.stride_tricks.as_strided(buffer, operand.shape, operand.strides_bytes)


MeasureC = Callable[[CProbe], float]
"""Return how long the launch of a probe takes, in nanoseconds, when it is repeated."""

_LIBRARIES: tuple[Library, ...] = (OneDnn(ThreadCut.ROWS), OpenBlas(ThreadCut.ROWS), Small())
_SMALL_FLOPS = 2 << 20
"""Products with more are not for the small one."""

_ELEMENTS = 1 << 15
"""Of a vector in the second-level cache, with what is made of it."""

_SHARED_ELEMENTS = 1 << 17
"""Of a vector that is cut into pieces enough for all threads."""

_SAMPLE_NS = 150_000
_SAMPLES, _FEW_SAMPLES = 24, 12
_SHARED_SAMPLES = 40
"""Where all threads take part: how far they get varies more."""

_VISITS = 3
"""A second each."""

_MOST_COPIES = 64
_LEAST = 1e-6
"""Per byte or flop: what a difference of two times may not fall below."""


def calibrate_c(measure: MeasureC) -> CRates:
    """Return the rates of C on this machine. Native kernels must be on."""
    visits: list[list[float]] = []
    for _ in range(_VISITS):
        times: list[float] = []
        _rates(partial(_noted, measure, times))
        visits.append(times)
    # `_rates` asks for probes in one order always, so the least times are handed out by place.
    least = iter([min(column) for column in zip(*visits, strict=True)])
    return _rates(lambda probe: next(least))


def _noted(measure: MeasureC, times: list[float], probe: CProbe) -> float:
    times.append(measure(probe))
    return times[-1]


def _rates(measure: MeasureC) -> CRates:
    """Return the rates that follow from the times of probes: the same ones in the same order."""
    call_ns = measure(program("add", 1, 1))
    # 8 bytes per element: 4 are read, 4 written.
    one = measure(program("add", 1, _ELEMENTS))
    passes = dict.fromkeys(BytePass, 0.0)
    passes[BytePass.SIMPLE] = max((one - call_ns) / (8.0 * _ELEMENTS), _LEAST)
    for op, times in INSTRUCTIONS.items():
        probe = program(op, times, _ELEMENTS)
        sort, size = probe.work.passes[-1]
        passes[sort] = max((measure(probe) - call_ns) / size, _LEAST)
    for probe in (
        row_sums(64, 512),
        random_bits(_ELEMENTS),
        moved(256),
        taken(1024, 64),
        added(1024, 64),
    ):
        sort, size = probe.work.passes[-1]
        passes[sort] = max((measure(probe) - call_ns) / size, _LEAST)
    return CRates(
        runtime.num_threads(),
        call_ns,
        *_shared(measure, call_ns),
        tuple([passes[sort] for sort in BytePass]),
        _misses(measure, passes),
        _products(measure, call_ns),
        *_attention(measure, call_ns),
    )


def _misses(measure: MeasureC, passes: dict[BytePass, float]) -> tuple[float, ...]:
    misses: list[float] = []
    for distance in C_DISTANCES_BYTES:
        probe = program("add", 1, distance // 8, leaves_caches=True)
        known_ns = probe.touched_bytes * passes[BytePass.SIMPLE]
        misses.append(max((measure(probe) - known_ns) / probe.touched_bytes, 0.0))
    return tuple(misses)


def _products(measure: MeasureC, call_ns: float) -> tuple[float, ...]:
    """Return the best rate of any library at every point of the grid."""
    rates: list[float] = []
    for m, n, k in product(C_EXTENTS, repeat=3):
        flops = 2 * m * n * k
        libraries = [x for x in _LIBRARIES if flops <= _SMALL_FLOPS or not isinstance(x, Small)]
        probes = [product_probe(library, m, n, k) for library in libraries]
        times = [measure(probe) for probe in probes if is_taken(probe)]
        rates.append(flops / max(min(times) - call_ns, flops * _LEAST))
    return tuple(rates)


def _attention(measure: MeasureC, call_ns: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    columns = []
    for is_forward in (True, False):
        rates = []
        for rows, width in product(ATTENTION_ROWS, ATTENTION_WIDTHS):
            probe = attention(rows, width, is_forward=is_forward)
            items = probe.work.forward or probe.work.backward
            flops = sum([item.flops for item in items])
            rates.append(flops / max(measure(probe) - call_ns, flops * _LEAST))
        columns.append(tuple(rates))
    return columns[0], columns[1]


def _shared(measure: MeasureC, call_ns: float) -> tuple[float, float, float, float, float]:
    """Return what opening and waking the pool cost, and what its threads gain.

    That is in passes, beyond the caches, and in products.
    """
    threads = runtime.num_threads()
    if threads < 2:
        return 0.0, 0.0, 1.0, 1.0, 1.0
    far = C_DISTANCES_BYTES[-1] // 8

    def times(probe: Callable[..., CProbe]) -> tuple[float, float]:
        return measure(probe(on_all_threads=False)), measure(probe(on_all_threads=True))

    def gain(probe: Callable[..., CProbe]) -> float:
        alone, together = times(probe)
        return min(max(alone / together, 1.0), float(threads))

    # Of a long and a short program, so that what opening costs is no part of what threads gain.
    long, short = [
        times(partial(program, "exp", 8, _SHARED_ELEMENTS // part, pieces=16 // part))
        for part in (1, 4)
    ]
    passes = (long[0] - short[0]) / max(long[1] - short[1], 1.0)
    # Noise may say that threads slow a pass down, or gain more than there are.
    passes = min(max(passes, 1.0), float(threads))
    open_ns = max(short[1] - call_ns - (short[0] - call_ns) / passes, 0.0)
    wide = partial(program, "add", 1, far, pieces=32, leaves_caches=True)
    alone, together = [
        program("exp", 8, _SHARED_ELEMENTS // part, pieces=pieces, on_all_threads=shares)
        for part, pieces, shares in ((8, 1, False), (4, 4, True))
    ]
    wake_ns = max(measure(after(alone, together)) - measure(alone) - short[1], 0.0)
    return open_ns, wake_ns, passes, gain(wide), gain(partial(shared_product, 256))


def stopwatch_c(clock: Clock) -> MeasureC:
    """Return how to measure a probe here: the median of some short samples."""

    def measure(probe: CProbe) -> float:
        if probe.on_all_threads:
            first = probe.make()
        else:
            with runtime.as_one_thread():
                first = probe.make()
        first()
        before = clock()
        first()
        once_ns = max(clock() - before, 1)
        copies = max(1, min(_MOST_COPIES, _SAMPLE_NS // once_ns))
        # Without the interpreter in between, which takes longer than a short launch.
        chain = NativeChain((first,) * copies)
        samples = _FEW_SAMPLES if once_ns > 10 * _SAMPLE_NS else _SAMPLES
        if probe.on_all_threads:
            samples = _SHARED_SAMPLES
        return median([_run(chain, clock) for _ in range(samples)]) / copies

    return measure


def _run(chain: NativeChain, clock: Clock) -> int:
    before = clock()
    chain()
    return clock() - before
