"""cuBLASLt by ctypes: descriptors of a product, and which of its algorithms is the fastest here.

Descriptors are made, and read back, without a GPU; a handle, algorithms and products need one.
Plans never depend on what is chosen here, for the workspace of a product is fixed before: the best
algorithm within it is timed once and kept. A deterministic product takes the first that the library
offers without a split of the inner extent.

Names and numbers: cublasLt.h of CUDA 13.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Protocol, TypeAlias, TypeVar

from actors.device.cuda.driver import (
    SCRATCH_BYTE,
    CudaError,
    DriverMemory,
    TimedAlternatives,
    is_of_library,
    is_out_of_memory,
)
from actors.kernels.common.files import load_measurements, replace_object
from actors.kernels.cuda.calls import LtEpilogue, LtLayout, LtProduct
from compiler.contract.codec import Text, text_where
from compiler.contract.types import DType

# Kept in a file for each library and GPU: the fastest algorithm of each product, and the number of
# the fastest of some ways to do the same, by what they do. A choice stands once it is made: the
# same product has the same algorithm in every later run, and so the same bits. Of two processes
# that measure at once, the first to keep is followed by the other.


_HEX = re.compile("([0-9a-f]{2})*")


@dataclass(frozen=True, slots=True)
class StoredChoices:
    """The content of the file: algorithms in hexadecimal digits."""

    made_for: Text
    products: Mapping[Text, Annotated[str, text_where(_HEX.fullmatch, "hexadecimal digits")]]


@dataclass(slots=True)
class ProductChoices:
    """Algorithms by the key of a product. `folder` None: kept in this process alone.

    `made_for` is what they depend on besides: the version of the library, and the GPU's name.
    """

    folder: Path | None
    made_for: str
    known: dict[str, bytes] = field(default_factory=dict)

    @property
    def file(self) -> Path | None:
        """Where they are kept."""
        mark = hashlib.blake2b(self.made_for.encode(), digest_size=8).hexdigest()
        return None if self.folder is None else self.folder / f"products-{mark}.json"

    def get(self, key: str) -> bytes | None:
        """Return the algorithm that is kept for a product, if any; of ways, the number of one."""
        if key not in self.known:
            self.known |= self._read()
        return self.known.get(key)

    def keep(self, key: str, algorithm: bytes) -> bytes:
        """Keep an algorithm, and return the one to use: another process may have been first."""
        # What is in the file wins: all processes then take the same algorithm, with the same bits.
        self.known = {**self.known, key: algorithm, **self._read()}
        if self.file is not None:
            products = {name: value.hex() for name, value in self.known.items()}
            with contextlib.suppress(OSError):  # a folder that cannot be written costs a trial
                replace_object(self.file, StoredChoices(self.made_for, products))
        return self.known[key]

    def _read(self) -> dict[str, bytes]:
        if self.file is None:
            return {}
        choices = load_measurements(self.file, StoredChoices, "products are timed again")
        if choices is None or choices.made_for != self.made_for:
            return {}
        return {name: bytes.fromhex(value) for name, value in choices.products.items()}


LIBRARY = "libcublasLt.so.13"

CANDIDATES, TRIALS = 8, 3
_ALIKE, _ALIKE_NS = 1.02, 2000.0
"""How much longer one may take that counts as being as fast: of short products the time that is
seen is that of the host, which puts them on the stream one by one."""

_LEAST_TRIED = 1 << 24
"""Multiplications of a product from which on one algorithm can be told from another: shorter ones
take the first that runs, and none of the others has to be loaded, which takes longer than all of
their runs."""

_TYPES = {DType.FLOAT32: 0, DType.FLOAT64: 1, DType.FLOAT16: 2, DType.BFLOAT16: 14}
_DTYPES = {number: dtype for dtype, number in _TYPES.items()}
_COMPUTE = {DType.FLOAT32: 68, DType.FLOAT64: 70}
"""In the type itself: float32 is not rounded to TF32."""

_STATES = {
    1: "not initialized",
    3: "out of memory",
    7: "invalid value",
    8: "not for this architecture",
    13: "execution failed",
    14: "internal error",
    15: "not supported",
}

_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS, _AUX, _AUX_STRIDE = 3, 4, 7, 8, 11, 12
_AUX_TYPE, _BIAS_TYPE, _UNSET = 22, 26, -1
_COMPUTE_TYPE, _SCALE_TYPE = 0, 1
_TYPE, _ORDER, _ROWS, _COLUMNS, _COLUMN_STRIDE, _BATCH, _BATCH_STRIDE = range(7)
_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_ALL_REDUCTIONS = 7
_BY_COLUMNS = 0

_I32, _U32, _I64, _U64 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64, ctypes.c_uint64
_Number: TypeAlias = "type[ctypes._SimpleCData[int]]"
_T = TypeVar("_T")


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [  # as ctypes wants it
        ("algorithm", _U64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class Trial(Protocol):
    """Where algorithms are timed: scratch of a GPU, and a clock. Used by one thread."""

    def scratch(self, sizes_bytes: Sequence[int]) -> tuple[int, ...]:
        """Return addresses of so many bytes each, multiples of 256, until the next call."""

    def duration_ns(self, run: Callable[[int], None]) -> float:
        """Return what `run(stream)` takes on the device, by events around it."""


@dataclass(slots=True, weakref_slot=True)
class LtDescriptors:
    """The descriptors of one product, by their handles; they go with the object.

    `beta` is no part of them: it is given with the operands.
    """

    beta: float
    product: int
    layouts: tuple[int, ...]
    preference: int


@dataclass(frozen=True, slots=True)
class LtChoice:
    """How a product is computed: its descriptors and an algorithm, in so much workspace."""

    descriptors: LtDescriptors
    compute: DType
    algorithm: bytes
    workspace_bytes: int


class CublasLt:
    """The library. Descriptors may be made by any thread; a handle is for one GPU."""

    def __init__(self, path: str | Path) -> None:
        """Load it. Raises OSError where there is none."""
        self.library = ctypes.CDLL(str(path))
        # ctypes assumes int, which would cut it to 32 bits.
        self.library.cublasLtGetVersion.restype = ctypes.c_size_t
        self._handle = ctypes.c_void_p()

    @property
    def version(self) -> int:
        """Its version: 130000 and more."""
        return int(self.library.cublasLtGetVersion())

    def open(self) -> None:
        """Make the handle for the GPU that is current in this thread. Raises CudaError."""
        self._call("cublasLtCreate", ctypes.byref(self._handle))

    def close(self) -> None:
        """Give the handle back."""
        if self._handle:
            self._call("cublasLtDestroy", self._handle)
            self._handle = ctypes.c_void_p()

    def describe(self, product: LtProduct, workspace_bytes: int) -> LtDescriptors:
        """Return the library's descriptors of a product. Needs no GPU; raises CudaError."""
        types = [ctypes.c_int(x) for x in (_COMPUTE[product.compute], _TYPES[product.compute])]
        destroys: list[tuple[str, int]] = []
        call = self._made(destroys, "MatmulDesc", *types)
        attributes: list[tuple[int, _Number, int]] = [
            (_TRANSPOSE_A, _I32, int(product.transpose_a)),
            (_TRANSPOSE_B, _I32, int(product.transpose_b)),
            (_EPILOGUE, _U32, product.epilogue.value),
        ]
        if product.bias:
            attributes.append((_BIAS, _U64, product.bias))
        if product.bias_dtype is not None:
            attributes.append((_BIAS_TYPE, _I32, _TYPES[product.bias_dtype]))
        if product.aux:
            attributes += [(_AUX, _U64, product.aux), (_AUX_STRIDE, _I64, product.aux_stride)]
            attributes.append((_AUX_TYPE, _I32, _TYPES[product.d.dtype]))
        self._set("MatmulDesc", call, attributes)
        sides = (product.a, product.b, product.d)
        layouts = tuple([self._layout(destroys, side, product.batch) for side in sides])
        preference = self._made(destroys, "MatmulPreference")
        alignments = [layout.alignment for layout in (product.a, product.b, product.d, product.d)]
        limits: list[tuple[int, _Number, int]] = [
            (_WORKSPACE, _U64, workspace_bytes),
            # Split sums may be added up with atomics, whose order is not fixed.
            (_REDUCTIONS, _U32, 0 if product.is_deterministic else _ALL_REDUCTIONS),
            *[(name, _U32, size) for name, size in zip(_ALIGNMENTS, alignments, strict=True)],
        ]
        self._set("MatmulPreference", preference, limits)
        descriptors = LtDescriptors(product.beta, call, layouts, preference)
        # Handles as plain ints: a reference to `descriptors` would keep it alive for ever.
        weakref.finalize(descriptors, _destroy, self.library, destroys)
        return descriptors

    def read_back(self, made: LtDescriptors) -> LtProduct:
        """Return what descriptors say, as a record. Raises CudaError."""

        def said(name: int, number: _Number) -> int:
            return self._get("MatmulDesc", made.product, name, number)

        def wanted(name: int) -> int:
            return self._get("MatmulPreference", made.preference, name, _U32)

        aligned = [wanted(_ALIGNMENTS[place]) for place in (0, 1, 3)]
        a, b, d = [
            self._read_layout(handle, alignment)
            for handle, alignment in zip(made.layouts, aligned, strict=True)
        ]
        batches = {self._get("MatrixLayout", h, _BATCH, _I32) for h in made.layouts}
        by_columns = {self._get("MatrixLayout", h, _ORDER, _I32) for h in made.layouts}
        if len(batches) != 1 or by_columns != {_BY_COLUMNS}:
            raise CudaError("the matrices of a product differ", code=7, call="cublasLt read back")
        if said(_AUX, _U64) and said(_AUX_TYPE, _I32) != _TYPES[d.dtype]:
            raise CudaError("aux is of another type", code=7, call="cublasLt read back")
        bias_type = said(_BIAS_TYPE, _I32)
        compute = said(_COMPUTE_TYPE, _I32)
        return LtProduct(
            a,
            b,
            d,
            transpose_a=bool(said(_TRANSPOSE_A, _I32)),
            transpose_b=bool(said(_TRANSPOSE_B, _I32)),
            batch=batches.pop(),
            beta=made.beta,
            compute=next(dtype for dtype, number in _COMPUTE.items() if number == compute),
            epilogue=LtEpilogue(said(_EPILOGUE, _U32)),
            bias=said(_BIAS, _U64),
            bias_dtype=None if bias_type == _UNSET else _DTYPES[bias_type],
            aux=said(_AUX, _U64),
            aux_stride=said(_AUX_STRIDE, _I64),
            is_deterministic=wanted(_REDUCTIONS) == 0,
        )

    def choose(
        self, product: LtProduct, workspace_bytes: int, trial: Trial, choices: ProductChoices
    ) -> LtChoice:
        """Return how to compute a product in so much workspace.

        The best of a few is timed on scratch, once for each key; a deterministic one is the first.
        Raises CudaError where nothing fits, naming the product.
        """
        descriptors = self.describe(product, workspace_bytes)
        key = f"{product.key}; in {workspace_bytes}"
        algorithm = choices.get(key)
        if algorithm is None:
            candidates = self._candidates(product, descriptors, workspace_bytes)
            best = candidates[0]
            if not product.is_deterministic:
                try:
                    best = self._fastest(product, candidates, workspace_bytes, trial)
                except CudaError as error:
                    if not is_out_of_memory(error):
                        raise
                    # The plan leaves no room to try: the first is taken, and not kept.
                    return LtChoice(descriptors, product.compute, best, workspace_bytes)
            algorithm = choices.keep(key, best)
        return LtChoice(descriptors, product.compute, algorithm, workspace_bytes)

    def warm(self, product: LtProduct, choice: LtChoice, trial: Trial) -> None:
        """Run a choice on scratch: what the library loads then it need not load in a capture.

        Raises CudaError.
        """
        self._fastest(product, [choice.algorithm], choice.workspace_bytes, trial)

    def run(
        self, choice: LtChoice, a: int, b: int, c: int, d: int, workspace: int, stream: int
    ) -> None:
        """Put a product on a stream. Raises CudaError."""
        descriptors = choice.descriptors
        # alpha and beta have the type that the product is computed in.
        number = ctypes.c_double if choice.compute is DType.FLOAT64 else ctypes.c_float
        alpha, beta = number(1.0), number(descriptors.beta)
        # cublasLtMatmulAlgo_t is 64 opaque bytes, which may be stored and used again.
        algorithm = (_U64 * 8).from_buffer_copy(choice.algorithm)
        la, lb, ld = [ctypes.c_void_p(handle) for handle in descriptors.layouts]
        self._call(
            "cublasLtMatmul",
            self._handle,
            ctypes.c_void_p(descriptors.product),
            ctypes.byref(alpha),
            *(ctypes.c_void_p(a), la, ctypes.c_void_p(b), lb, ctypes.byref(beta)),
            *(ctypes.c_void_p(c), ld, ctypes.c_void_p(d), ld),
            ctypes.byref(algorithm),
            ctypes.c_void_p(workspace),
            ctypes.c_size_t(choice.workspace_bytes if workspace else 0),
            ctypes.c_void_p(stream),
        )

    def _candidates(
        self, product: LtProduct, made: LtDescriptors, workspace_bytes: int
    ) -> list[bytes]:
        """Return algorithms that fit, the most promising first. Raises CudaError for none."""
        results, count = (_Heuristic * CANDIDATES)(), ctypes.c_int()
        la, lb, ld = [ctypes.c_void_p(handle) for handle in made.layouts]
        call = "cublasLtMatmulAlgoGetHeuristic"
        code = getattr(self.library, call)(
            self._handle,
            ctypes.c_void_p(made.product),
            *(la, lb, ld, ld),
            ctypes.c_void_p(made.preference),
            CANDIDATES,
            results,
            ctypes.byref(count),
        )
        fitting = [
            bytes(entry.algorithm)
            for entry in results[: count.value]
            if entry.state == 0 and entry.workspace_bytes <= workspace_bytes
        ]
        if code or not fitting:
            raise CudaError(
                f"cuBLASLt has no algorithm for the product {product.key} within"
                f" {workspace_bytes:,} bytes of workspace: {_state(code or 15)}",
                code=code or 15,
                call=call,
            )
        return fitting

    def _fastest(
        self, product: LtProduct, found: Sequence[bytes], workspace_bytes: int, trial: Trial
    ) -> bytes:
        """Return the fastest algorithm of those that run; of a short product the first of them.

        Raises CudaError when none does.

        Of some that take about as long it is the first, which the library thinks most of. What an
        epilogue writes goes to scratch too: the plan's memory may hold variables by now.
        """
        spans = [x.span_bytes(product.batch) for x in (product.a, product.b, product.d)]
        extra_bytes = [
            product.bias_type.itemsize * max(product.d.rows, product.d.columns),
            product.d.dtype.itemsize * max(product.aux_stride, 1) * product.d.columns,
        ]
        a, b, d, bias, aux, workspace = trial.scratch((*spans, *extra_bytes, workspace_bytes))
        tried = replace(product, bias=bias if product.bias else 0, aux=aux if product.aux else 0)
        descriptors = self.describe(tried, workspace_bytes)
        results = product.batch * product.d.rows * product.d.columns
        is_short = results * product.inner < _LEAST_TRIED
        times: list[tuple[float, bytes]] = []
        failure: CudaError | None = None
        for algorithm in found:
            choice = LtChoice(descriptors, product.compute, algorithm, workspace_bytes)
            run = partial(self.run, choice, a, b, d, d, workspace)
            try:
                # The median: the first run may load a kernel, and another process may hold the GPU.
                median_ns = median([trial.duration_ns(run) for _ in range(TRIALS)])
            except CudaError as error:
                failure = error
                continue
            times.append((median_ns, algorithm))
            if is_short:
                break
        if not times and failure is not None:
            raise failure
        return first_of_fastest(times)

    def _layout(self, destroys: list[tuple[str, int]], side: LtLayout, batch: int) -> int:
        extents = (_U64(side.rows), _U64(side.columns), _I64(side.column_stride))
        handle = self._made(destroys, "MatrixLayout", ctypes.c_int(_TYPES[side.dtype]), *extents)
        self._set(
            "MatrixLayout",
            handle,
            [(_BATCH, _I32, batch), (_BATCH_STRIDE, _I64, side.batch_stride)],
        )
        return handle

    def _read_layout(self, handle: int, alignment: int) -> LtLayout:
        def said(name: int, number: _Number) -> int:
            return self._get("MatrixLayout", handle, name, number)

        return LtLayout(
            _DTYPES[said(_TYPE, _U32)],
            said(_ROWS, _U64),
            said(_COLUMNS, _U64),
            said(_COLUMN_STRIDE, _I64),
            said(_BATCH_STRIDE, _I64),
            alignment,
        )

    def _made(self, destroys: list[tuple[str, int]], sort: str, *given: Any) -> int:
        handle = ctypes.c_void_p()
        self._call(f"cublasLt{sort}Create", ctypes.byref(handle), *given)
        destroys.append((f"cublasLt{sort}Destroy", handle.value or 0))
        return handle.value or 0

    def _set(self, sort: str, handle: int, attributes: Sequence[tuple[int, _Number, int]]) -> None:
        for name, number, value in attributes:
            c_value = number(value)
            arguments = (ctypes.byref(c_value), ctypes.c_size_t(ctypes.sizeof(c_value)))
            self._call(f"cublasLt{sort}SetAttribute", ctypes.c_void_p(handle), name, *arguments)

    def _get(self, sort: str, handle: int, name: int, number: _Number) -> int:
        c_value, written_bytes = number(), ctypes.c_size_t()
        self._call(
            f"cublasLt{sort}GetAttribute",
            ctypes.c_void_p(handle),
            name,
            ctypes.byref(c_value),
            ctypes.c_size_t(ctypes.sizeof(c_value)),
            ctypes.byref(written_bytes),
        )
        return int(c_value.value)

    def _call(self, name: str, *given: Any) -> None:
        code = getattr(self.library, name)(*given)
        if code:
            raise CudaError(f"{name}: {_state(code)}", code=code, call=name)


def first_of_fastest(times: Sequence[tuple[float, _T]]) -> _T:
    """Return the first of those that take about as long as the fastest; times in nanoseconds."""
    limit = min([duration for duration, _ in times]) * _ALIKE + _ALIKE_NS
    return next(choice for duration, choice in times if duration <= limit)


def _destroy(library: ctypes.CDLL, handles: Sequence[tuple[str, int]]) -> None:
    for name, handle in handles:
        getattr(library, name)(ctypes.c_void_p(handle))


def _state(code: int) -> str:
    return f"{_STATES.get(code, 'unknown')} (cuBLAS status {code})"


_NON_BLOCKING = 1


class LibraryTrial:
    """Memory and a clock on which libraries are tried; both go at the end of the `with`."""

    def __init__(self, driver: DriverMemory, ask: Callable[..., Any]) -> None:
        self._driver, self._ask = driver, ask
        self._blocks: list[int] = []

    def __enter__(self) -> LibraryTrial:
        return self

    def __exit__(self, *_: object) -> None:
        self._free()

    def scratch(self, sizes_bytes: Sequence[int]) -> tuple[int, ...]:
        """Return addresses of so many bytes each, until the next call."""
        self._free()
        for size in sizes_bytes:
            self._blocks.append(self._driver.allocate(max(size, 1)))
            self._ask("memset", self._blocks[-1], SCRATCH_BYTE, max(size, 1))
        self._ask("streamSynchronize", 0)  # a stream of ours would run beside the fill
        return tuple(self._blocks)

    def duration_ns(self, run: Callable[[int], None]) -> float:
        """Return what `run(stream)` takes on the device, by events around it."""
        ask = self._ask
        stream = ask("streamCreateWithFlags", _NON_BLOCKING)
        begin, end = ask("eventCreate"), ask("eventCreate")
        try:
            ask("eventRecord", begin, stream)
            run(stream)
            ask("eventRecord", end, stream)
            ask("eventSynchronize", end)
            # Milliseconds.
            return float(ask("eventElapsedTime", begin, end)) * 1e6
        finally:
            for name, handle in (("eventDestroy", begin), ("eventDestroy", end)):
                ask(name, handle)
            ask("streamDestroy", stream)

    def fastest_way(self, ways: TimedAlternatives) -> int:
        """Return the number of the fastest; one that the library refuses as it runs is left out.

        Raises CudaError where that is each of them.
        """
        times: list[tuple[float, int]] = []
        failure: CudaError | None = None
        self.duration_ns(ways.fill)
        for number, run in enumerate(ways.runs):
            try:
                self.duration_ns(run)  # the first run loads what the library needs
                median_ns = median([self.duration_ns(run) for _ in range(TRIALS)])
            except CudaError as error:
                if not is_of_library(error):
                    raise
                failure = error
            else:
                times.append((median_ns, number))
        if not times and failure is not None:
            raise failure
        return first_of_fastest(times)

    def _free(self) -> None:
        while self._blocks:
            self._driver.free(self._blocks.pop())
