"""oneDNN through its C interface: the one owner of the library.

The package onednn-cpu-gomp carries one library and no headers; the declarations below are what is
used of it, with every handle as a pointer and every enum as an int. The numbers are the same from
version 3.2 to 3.13.

The library's own threads are never used: primitives are made and run with its OpenMP set to one
thread, and our pool runs many of them at once. Scratch is the user's: an argument that a launch
gives per worker. A primitive is thread-safe so. An implementation whose name contains "ref" is the
library's way to say that it has none, and counts as refused.

State of the module, and why: the engine belongs to the process, and primitives are shared by all
launches of one shape, as making one takes some 0.3 ms.
"""

from __future__ import annotations

import filecmp
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from actors.kernels.library import resident
from actors.machine.errors import forkable_lock
from compiler.contract.errors import ActorflowError
from compiler.contract.types import DType

T = TypeVar("T")

PACKAGE = "onednn-cpu-gomp"

SOURCE, WEIGHTS, DESTINATION = 1, 33, 17
SOURCE_GRAD, WEIGHTS_GRAD, DESTINATION_GRAD = 129, 161, 145
"""Which argument of a primitive a memory is."""

TYPES = {DType.BFLOAT16: 2, DType.FLOAT32: 3}
_CPU, _IN_ORDER, _USER_SCRATCH, ANY = 1, 1, 1, 1
_QUERY_NAME, _QUERY_SCRATCH = 8, 136
QUERY_OF = {SOURCE: 129, WEIGHTS: 131, DESTINATION: 133}
QUERY_OF |= {SOURCE_GRAD: 130, WEIGHTS_GRAD: 132, DESTINATION_GRAD: 134}
_STATUS = {
    1: "out of memory",
    2: "invalid arguments",
    3: "not implemented",
    4: "the end of a list",
    5: "an error at run time",
    6: "not required",
}


class LibraryError(ActorflowError):
    """oneDNN answers with a status other than 0; the message names the call and what it was for."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of a primitive: extents, and strides in elements.

    `is_packed`: in a layout of the library's choice; strides mean nothing then.
    """

    dtype: DType
    rows: int
    columns: int
    row: int
    column: int
    is_packed: bool = False


@dataclass(frozen=True, slots=True)
class Primitive:
    """A primitive that is ready to run: its handle, its implementation, and its scratch.

    `packed_bytes` is the size of the weights of a product in the library's own layout.
    """

    handle: int
    name: str
    scratch_bytes: int
    packed_bytes: int
    descriptor: Any = field(compare=False, repr=False)


@dataclass(slots=True)
class Onednn:
    """The loaded library with its engine and stream; handles are cffi objects.

    `code` is the address of one of its functions.
    """

    ffi: Any
    calls: Any
    engine: Any
    stream: Any
    version: str
    code: int


@dataclass(slots=True)
class _OnednnState:
    is_sought: bool = False
    library: Onednn | None = None
    made: dict[object, object] = field(default_factory=dict)


_state = _OnednnState()
_lock = forkable_lock()


def is_available() -> bool:
    """Whether the library is installed and loads."""
    return _library() is not None


def fingerprint() -> str:
    """Return what needs and results depend on: version and instructions; "" without the library."""
    library = _library()
    if library is None:
        return ""
    return f"onednn-{library.version}-{library.calls.dnnl_get_effective_cpu_isa():x}"


def address_of(function: str) -> int:
    """Return the address of a function of the library. Raises LibraryError without the library."""
    library = require_library()
    return int(library.ffi.cast("intptr_t", library.ffi.addressof(library.calls, function)))


def stream() -> int:
    """Return the handle of the stream that launches run on."""
    library = require_library()
    return int(library.ffi.cast("intptr_t", library.stream))


def release_code() -> None:
    """Unmap what loading the library and making primitives has run, if it is loaded."""
    if _state.library is not None:
        resident.release_code(_state.library.code)


def matmul(a: Matrix, b: Matrix, out: Matrix, *, adds: bool = False) -> Primitive | None:
    """Return the primitive of out = a @ b, made at the first call; None where it is refused.

    With `adds` the product is added to what `out` holds.
    """
    return shared((a, b, out, adds), lambda: _matmul(a, b, out, adds))


def pack(b: Matrix, first: int, columns: int, product: Primitive) -> Primitive | None:
    """Return the primitive that copies columns of b to their place in the weights of a product.

    Its source is b from column `first` on, its destination the whole packed b.
    """
    return shared((b, first, columns, product), lambda: _pack(b, first, columns, product))


def pack_alike(first: Primitive, second: Primitive) -> bool:
    """Whether two products read their weights in one layout."""
    library = require_library()
    weights = [
        library.calls.dnnl_primitive_desc_query_md(x.descriptor, QUERY_OF[WEIGHTS], 0)
        for x in (first, second)
    ]
    return bool(library.calls.dnnl_memory_desc_equal(*weights))


def shared(key: object, make: Callable[[], T | None]) -> T | None:
    """Return what is made for a key at its first call, of primitives; None where it is refused."""
    with _lock:
        # Refusals are kept as None, so that a shape is asked for once.
        if key not in _state.made:
            try:
                _state.made[key] = make()
            except LibraryError:  # what it does not describe it does not compute either
                _state.made[key] = None
        return cast("T | None", _state.made[key])


def memory(primitive: Primitive, argument: int, address: int) -> Any:
    """Return the memory object of an argument at an address; it lives as long as what is returned.

    Raises LibraryError.
    """
    return _memory(primitive, QUERY_OF[argument], address)


def scratch(primitive: Primitive, address: int) -> Any:
    """Return the memory object of the scratch at an address. Raises LibraryError."""
    return _memory(primitive, _QUERY_SCRATCH, address)


def handle_of(memory: Any) -> int:
    """Return the handle of a memory object, as C takes it."""
    return int(require_library().ffi.cast("intptr_t", memory))


def explain(status: int) -> str:
    """Return what a status of the library means."""
    return f"oneDNN answers with {_STATUS.get(status, 'an unknown status')}"


def _memory(primitive: Primitive, query: int, address: int) -> Any:
    library = require_library()
    described = library.calls.dnnl_primitive_desc_query_md(primitive.descriptor, query, 0)
    # The library writes the handle of what it made here.
    handle = library.ffi.new("H *")
    target = library.ffi.cast("void *", address)
    _check(
        library.calls.dnnl_memory_create(handle, described, library.engine, target),
        f"memory of a primitive ({primitive.name})",
    )
    # Destroyed with the Python object: whoever keeps only the handle loses the memory object.
    return library.ffi.gc(handle[0], library.calls.dnnl_memory_destroy)


def _matmul(a: Matrix, b: Matrix, out: Matrix, adds: bool) -> Primitive | None:
    library = _library()
    if library is None or any([x.dtype not in TYPES for x in (a, b, out)]):
        return None
    calls, null = library.calls, library.ffi.NULL
    with (
        one_thread(library),
        _described(library, a, b, out) as (src, wei, dst),
        attributes(library, adds) as attr,
    ):
        descriptor = library.ffi.new("H *")
        status = calls.dnnl_matmul_primitive_desc_create(
            descriptor, library.engine, src, wei, null, dst, attr
        )
        return None if status else create_primitive(library, descriptor[0])


def _pack(b: Matrix, first: int, columns: int, product: Primitive) -> Primitive | None:
    library = require_library()
    ffi, calls = library.ffi, library.calls
    part = Matrix(b.dtype, b.rows, columns, b.row, b.column)
    whole = calls.dnnl_primitive_desc_query_md(product.descriptor, QUERY_OF[WEIGHTS], 0)
    extents, begin = ffi.new("int64_t[12]", [b.rows, columns]), ffi.new("int64_t[12]", [0, first])
    window, descriptor = ffi.new("H *"), ffi.new("H *")
    if calls.dnnl_memory_desc_create_submemory(window, whole, extents, begin):
        return None
    try:
        with one_thread(library), _described(library, part) as (src,), attributes(library) as attr:
            engine = library.engine
            status = calls.dnnl_reorder_primitive_desc_create(
                descriptor, src, engine, window[0], engine, attr
            )
            return None if status else create_primitive(library, descriptor[0])
    finally:
        calls.dnnl_memory_desc_destroy(window[0])


def create_primitive(library: Onednn, pd: Any) -> Primitive | None:
    """Return the primitive of a descriptor, which it keeps; None for a reference implementation."""
    ffi, calls = library.ffi, library.calls
    # First: whatever fails below, the descriptor is given back.
    descriptor = ffi.gc(pd, calls.dnnl_primitive_desc_destroy)
    c_name = ffi.new("const char **")
    _check(calls.dnnl_primitive_desc_query(pd, _QUERY_NAME, 0, c_name), "the name of a primitive")
    name = ffi.string(c_name[0]).decode("ascii", "replace")
    if "ref" in name:
        return None
    primitive = ffi.new("H *")
    if calls.dnnl_primitive_create(primitive, pd):
        return None
    scratch_bytes, packed_bytes = [
        int(calls.dnnl_memory_desc_get_size(desc)) if desc != ffi.NULL else 0
        for desc in (
            calls.dnnl_primitive_desc_query_md(pd, query, 0)
            for query in (_QUERY_SCRATCH, QUERY_OF[WEIGHTS])
        )
    ]
    handle = int(ffi.cast("intptr_t", primitive[0]))
    return Primitive(handle, name, scratch_bytes, packed_bytes, descriptor)


@contextmanager
def one_thread(library: Onednn) -> Iterator[None]:
    """Let the library believe that it has one thread, for what is made in here."""
    # The library looks at this number when it makes a primitive: blocks and scratch depend on it.
    before = library.calls.omp_get_max_threads()
    library.calls.omp_set_num_threads(1)
    try:
        yield
    finally:
        library.calls.omp_set_num_threads(before)


@contextmanager
def _described(library: Onednn, *matrices: Matrix) -> Iterator[tuple[Any, ...]]:
    """Give the library's descriptions of plain matrices."""
    ffi, calls = library.ffi, library.calls
    mds: list[Any] = []
    try:
        for matrix in matrices:
            md = ffi.new("H *")
            # 12 is DNNL_MAX_NDIMS: the library copies a whole array of dimensions.
            extents = ffi.new("int64_t[12]", [matrix.rows, matrix.columns])
            strides = ffi.new("int64_t[12]", [matrix.row, matrix.column])
            dtype = TYPES[matrix.dtype]
            if matrix.is_packed:
                status = calls.dnnl_memory_desc_create_with_tag(md, 2, extents, dtype, ANY)
            else:
                status = calls.dnnl_memory_desc_create_with_strides(md, 2, extents, dtype, strides)
            _check(status, f"the description of {matrix}")
            mds.append(md[0])
        yield tuple(mds)
    finally:
        # Only those that were made before an error; primitives keep copies of descriptions.
        for md in mds:
            calls.dnnl_memory_desc_destroy(md)


@contextmanager
def attributes(library: Onednn, adds: bool = False) -> Iterator[Any]:
    """Give the attributes of a primitive: scratch comes from us, and results may be added up."""
    handle, calls = library.ffi.new("H *"), library.calls
    _check(calls.dnnl_primitive_attr_create(handle), "attributes")
    try:
        _check(
            calls.dnnl_primitive_attr_set_scratchpad_mode(handle[0], _USER_SCRATCH),
            "the scratch of attributes",
        )
        if adds:
            _add_to_output(library, handle[0])
        yield handle[0]
    finally:
        calls.dnnl_primitive_attr_destroy(handle[0])


def _add_to_output(library: Onednn, attr: Any) -> None:
    ops, calls = library.ffi.new("H *"), library.calls
    _check(calls.dnnl_post_ops_create(ops), "operations after a product")
    try:
        _check(calls.dnnl_post_ops_append_sum(ops[0], 1.0, 0, 0), "a sum after a product")
        _check(calls.dnnl_primitive_attr_set_post_ops(attr, ops[0]), "attributes with a sum")
    finally:
        calls.dnnl_post_ops_destroy(ops[0])


def require_library() -> Onednn:
    """Return the library. Raises LibraryError without it."""
    library = _library()
    if library is None:
        raise LibraryError(
            f"a plan has kernels of oneDNN, which is not here; install the package {PACKAGE}, or"
            " compile the job again"
        )
    return library


def _library() -> Onednn | None:
    with _lock:
        if not _state.is_sought:
            # Before the search: a library that is missing is looked for once.
            _state.is_sought = True
            _state.library = _loaded()
        return _state.library


def _loaded() -> Onednn | None:
    """Return the library with its engine, or None when any part of that is missing."""
    try:
        from actors.kernels.library.onednn_calls import ffi  # late: absent where cffi is
    except ImportError:
        return None
    paths = _paths()
    path = next((p for p in paths if p.name == "libdnnl.so.3"), None)
    if path is None:
        return None
    share_bytes(path, paths)
    try:
        # Never unmapped: at the end of the process memory objects may be destroyed after `calls`.
        calls = ffi.dlopen(str(path), os.RTLD_NOW | os.RTLD_NODELETE)
        version = calls.dnnl_version()
        engine = _new(ffi, lambda out: calls.dnnl_engine_create(out, _CPU, 0), "the engine")
        stream = _new(ffi, lambda out: calls.dnnl_stream_create(out, engine, _IN_ORDER), "a stream")
    except (OSError, AttributeError, LibraryError):
        return None
    numbers = f"{version.major}.{version.minor}.{version.patch}"
    code = int(ffi.cast("intptr_t", ffi.addressof(calls, "dnnl_primitive_execute")))
    return Onednn(ffi, calls, engine, stream, numbers, code)


def _paths() -> list[Path]:
    """Return where the package put its library; it lies outside of site-packages."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [Path(str(f.locate())) for f in files if f.name.startswith("libdnnl.so")]


def share_bytes(path: Path, copies: Iterable[Path]) -> None:
    """Turn files that are equal to one, in its folder, into links to it.

    A wheel cannot hold links, so the package has its library three times: 164 MB, of which 109 are
    free after the first use. Files that differ, and a folder that may not be written, stay as they
    are. Each name goes on to be a whole library, also for other processes at this moment.
    """
    for copy in copies:
        try:
            is_linked = copy == path or copy.samefile(path)
            if is_linked or copy.parent != path.parent or not os.access(path.parent, os.W_OK):
                continue
            if filecmp.cmp(path, copy, shallow=False):
                link = copy.with_name(f".{copy.name}.{os.getpid()}")
                os.link(path, link)
                try:
                    link.replace(copy)
                finally:  # of two links to one file `replace` leaves both
                    link.unlink(missing_ok=True)
        except OSError:  # a file system without links, or another process that was faster
            continue


def _new(ffi: Any, make: Callable[[Any], int], what: str) -> Any:
    handle = ffi.new("H *")
    _check(make(handle), what)
    return handle[0]


def _check(status: int, what: str) -> None:
    if status:
        raise LibraryError(f"oneDNN does not make {what}: {_STATUS.get(status, status)}")
