"""What a data source must answer, the checks that every batch passes, and any iterator as a source.

A source is a position in a sequence of batches. `state()` is the position after the last batch that
was returned; the runner keeps the state of every batch in flight and saves the one that belongs to
the last *committed* step, so a prefetcher that is k batches ahead never makes a resumed run skip k
batches. A source that is made of an iterator has no positions: `from_iterable` resumes by counting.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Any, Protocol, Self, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt
import xxhash

from compiler.contract.arrays import as_array
from compiler.contract.errors import ActorflowError
from compiler.contract.html_table import html_table
from compiler.contract.types import DType, TensorType

_CHUNK_BYTES = 1 << 24
_DTYPE_NAMES = tuple(d.value for d in DType)
_DTYPES = {np.dtype(d.value): d for d in DType if d is not DType.BFLOAT16}

Batch = Mapping[str, npt.NDArray[Any]]


class DataError(ActorflowError):
    """The user's data is too short, of the wrong type, or not what the job was compiled for."""


class EndlessSource(TypeError):
    """The length of a source was asked for that never ends."""


class DataSource(Protocol):
    """A seekable sequence of batches; used by one thread at a time.

    Two optional attributes describe the rate of progress: `items_per_batch` (int) and `item_name`
    (such as "tokens"); read them with `items_of`. `row_mask` (str) names the array [batch] of a
    batch that is 0 for rows which only fill it up. A source whose batches have several shapes has
    `specs`, too: see `DeclaresSpecs`.
    """

    def spec(self) -> dict[str, TensorType]:
        """Return the type of every array of a batch; the same for every batch without `specs`."""

    def __next__(self) -> Batch:
        """Return the next batch, whose arrays the caller owns.

        Raises:
            StopIteration: there is no further batch.
        """

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch returned, as JSON-able values."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a position that `state` returned; the next batch is the one that followed there.

        Raises:
            DataError: `state` is not one of this kind of source.
        """

    def fingerprint(self) -> str:
        """Return length, content hash and parameters: equal if and only if the stream is equal."""


@runtime_checkable
class DeclaresSpecs(Protocol):
    """A source whose batches have several shapes, such as buckets of lengths; see `specs_of`.

    A run compiles a plan for each before its first step, and takes the one of each batch's types.
    The batches of one step (`accumulate`) have one type.
    """

    def specs(self) -> tuple[dict[str, TensorType], ...]:
        """Return the types of all batches that may come, always in the same order.

        All have the same names and element types, no two are equal, and `spec()` is one of them.
        """


@runtime_checkable
class FillsBatches(Protocol):
    """A source that can write a batch into arrays that the caller already has."""

    def next_into(self, out: Batch) -> None:
        """Write the next batch into `out`, whose arrays have the types of `spec()`.

        Raises:
            StopIteration: there is no further batch; `out` is unchanged.
        """


@runtime_checkable
class FillsRows(Protocol):
    """A source that can give some rows of a batch without reading the others.

    Ranks that share a batch each have a source of whole batches, and take their rows of it. Of one
    without this method they take the whole batch and cut it.
    """

    def next_rows_into(self, out: Batch, rows: Mapping[str, slice]) -> None:
        """Write those rows of the next batch into `out`, whose arrays have as many.

        `rows` has, by name, slices along the first axis, perhaps empty; an array that it does not
        name is wanted whole. The position is then that after the whole batch, on all ranks alike.

        Raises:
            StopIteration: there is no further batch; `out` is unchanged.
        """


Part = tuple[slice, ...]
"""Where in the array of a whole batch a rank's part lies."""

_ANSWERS = ("next_rows_into", "next_into", "__next__")


def filler_of(source: DataSource, parts: Mapping[str, Part]) -> Callable[[Batch], None] | None:
    """Return what writes the next batch, or a rank's parts of it, straight into arrays.

    None where the source has no such method, or where those are not the batches that it would
    return: a class derived from such a source, or one that wraps it, may have a `__next__` of its
    own that the `next_into` it got from there knows nothing of: then that `__next__` says what a
    batch is.
    """
    # The first class of the MRO that defines any of the three decides: what comes from further up
    # may not know of its `__next__`.
    answers = [vars(part).keys() & _ANSWERS for part in type(source).__mro__]
    answer = next((names for names in answers if names), set())
    if not parts:
        fills = source if isinstance(source, FillsBatches) else None
        # isinstance of a runtime protocol looks only for the name, which a wrapper may answer by
        # getattr.
        return None if fills is None or "next_into" not in answer else fills.next_into
    if "next_rows_into" not in answer or not isinstance(source, FillsRows):
        return None
    spec = source.spec()
    for name, part in parts.items():
        # A part that is cut along another axis too cannot be told by rows.
        if name not in spec or part[1:] != tuple([slice(0, n) for n in spec[name].shape[1:]]):
            return None  # of columns there is no such method
    rows = {name: part[0] for name, part in parts.items()}
    return partial(_next_rows_into, source, rows)


def _next_rows_into(source: FillsRows, rows: Mapping[str, slice], out: Batch) -> None:
    source.next_rows_into(out, rows)


def items_of(source: DataSource) -> tuple[int, str]:
    """Return (items per batch, name of an item) of a source.

    A source without these attributes counts samples: the leading extent of its first array, or 1.
    """
    name = str(getattr(source, "item_name", "samples"))
    declared = getattr(source, "items_per_batch", None)
    if declared is not None:
        return int(declared), name
    first = next(iter(source.spec().values()), None)
    return (first.shape[0] if first is not None and first.shape else 1), name


def specs_of(source: DataSource) -> tuple[dict[str, TensorType], ...]:
    """Return the types of all batches that a source may give; `spec()` alone without `specs`.

    Raises:
        DataError: the source declares none, two equal ones, other names or element types in one of
            them, or not the one that `spec()` returns.
    """
    if not isinstance(source, DeclaresSpecs):
        return (source.spec(),)
    specs = tuple([checked_spec(spec) for spec in source.specs()])
    dtypes = [{name: type_.dtype for name, type_ in spec.items()} for spec in specs]
    is_repeated = any([spec in specs[:place] for place, spec in enumerate(specs)])
    if is_repeated or source.spec() not in specs or any([d != dtypes[0] for d in dtypes]):
        raise DataError(
            f"specs() of the {type(source).__name__}: expected types that differ in shapes alone,"
            f" each once, and among them that of spec(), {_types(source.spec())}; came"
            f" {'; '.join(map(_types, specs)) or 'none'}"
        )
    return specs


def place_of_spec(
    batch: Mapping[str, Any], specs: Sequence[Mapping[str, TensorType]], where: str = ""
) -> int:
    """Return which of the types that a source declares a batch has. Raises DataError: none."""
    if len(specs) == 1:
        check_batch(batch, specs[0], where)
        return 0
    came = spec_of(batch, where)
    for place, spec in enumerate(specs):
        if came == spec:
            return place
    raise DataError(
        f"batch{_at(where)}: expected one of the types that the source declares, which are"
        f" {'; '.join(map(_types, specs))}, came {_types(came)}; add it to"
        " specs(), or pad the batch"
    )


def _types(spec: Mapping[str, TensorType]) -> str:
    return ", ".join([f"{name}: {type_}" for name, type_ in spec.items()])


def spec_of(batch: Mapping[str, Any], where: str = "") -> dict[str, TensorType]:
    """Return the type of every array of a batch.

    Raises:
        DataError: a value is no array, or is of an element type that no plan can hold.
    """
    if not isinstance(batch, Mapping):
        raise DataError(
            f"batch{_at(where)}: expected a dict {{name: array}}, came {type(batch).__name__}"
        )
    return {name: _type_of(name, value, where) for name, value in batch.items()}


def checked_spec(spec: object) -> dict[str, TensorType]:
    """Return a spec that a user wrote: {name: TensorType}, or {name: (dtype, shape)}.

    Raises:
        DataError: names the entry that is neither.
    """
    if not isinstance(spec, Mapping):
        raise DataError(f"spec: expected {{name: TensorType}}, came {type(spec).__name__}")
    types: dict[str, TensorType] = {}
    for name, entry in spec.items():
        pair = (entry.dtype, entry.shape) if isinstance(entry, TensorType) else entry
        try:
            dtype, shape = pair
            name_of_dtype = dtype.value if isinstance(dtype, DType) else np.dtype(dtype).name
            # operator.index takes ints of numpy, and refuses floats that int() would cut.
            types[name] = TensorType(DType(name_of_dtype), tuple(operator.index(n) for n in shape))
            if types[name].dtype is DType.BFLOAT16:
                raise DataError(
                    f"spec[{name!r}]: expected an element type that numpy arrays have, came"
                    " bfloat16; give float32, and the job precision='bf16'"
                )
        except (TypeError, ValueError):
            raise DataError(
                f"spec[{name!r}]: expected TensorType(dtype, shape) such as"
                f" af.TensorType(af.DType.FLOAT32, (32, 8)), came {entry!r}"
            ) from None
    return types


def check_batch(batch: object, spec: Mapping[str, TensorType], where: str = "") -> None:
    """Check that `batch` has exactly the arrays that `spec` promises.

    Args:
        batch: what the user's source returned.
        spec: the types that the plan was compiled for.
        where: the user's own line, such as "train.py:41"; part of every message.

    Raises:
        DataError: names the entry, the type expected, the type that came, and `where`.
    """
    at = _at(where)
    if not isinstance(batch, Mapping):
        raise DataError(
            f"batch{at}: expected a dict with the keys {listed(spec)}, came"
            f" {type(batch).__name__}; return {{name: array}} from the data source"
        )
    missing = [name for name in spec if name not in batch]
    unexpected = [name for name in batch if name not in spec]
    if missing or unexpected:
        raise DataError(_keys_message(at, spec, batch, missing, unexpected))
    for name, expected in spec.items():
        value = plain_array(batch[name])
        if value is None:
            raise DataError(_not_an_array(name, batch[name], at, f"{expected}, "))
        if value.shape != expected.shape or value.dtype != np.dtype(expected.dtype.value):
            raise DataError(_mismatch(name, value, expected, at))


def _keys_message(
    at: str, spec: Mapping[str, Any], batch: Mapping[Any, Any], missing: list[str], extra: list[Any]
) -> str:
    wrong = [f"{listed(missing)} missing"] if missing else []
    wrong += [f"{listed(extra)} unexpected"] if extra else []
    return (
        f"batch{at}: expected the keys {listed(spec)}, came {listed(batch)}: {', '.join(wrong)};"
        " every batch has the keys of the source's spec()"
    )


def _mismatch(name: str, value: npt.NDArray[Any], expected: TensorType, at: str) -> str:
    head = f"batch[{name!r}]{at}: expected {expected}, came {shown(value)}; "
    if value.shape == expected.shape:
        return head + f"convert it in the data source: array.astype(np.{expected.dtype})"
    if value.shape[1:] == expected.shape[1:] and value.ndim == len(expected.shape):
        return head + "every batch has the same length: drop the last short batch, or pad it"
    return head + "a plan has static shapes: give every batch the shape of the source's spec()"


def _type_of(name: str, given: object, where: str) -> TensorType:
    value = plain_array(given)
    if value is None:
        raise DataError(_not_an_array(name, given, _at(where), ""))
    # By the dtype itself, which has the byte order: its name takes numpy some microseconds.
    dtype = _DTYPES.get(value.dtype) or _of_another_library(value.dtype)
    if dtype is None:
        raise DataError(
            f"batch[{name!r}]{_at(where)}: expected one of the element types"
            f" {', '.join(_DTYPE_NAMES)}, came {shown(value)}; convert it with array.astype(...)"
        )
    return TensorType(dtype, value.shape)


def _of_another_library(dtype: np.dtype[Any]) -> DType | None:
    """Return bfloat16 for its dtype, which numpy does not have; None for what we do not have."""
    return DType.BFLOAT16 if dtype.name == DType.BFLOAT16.value and dtype.isnative else None


def is_plain_array(value: object) -> TypeGuard[npt.NDArray[Any]]:
    """Return whether a value is an array of numpy without a mask, which a plan has no place for."""
    return isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray)


def plain_array(value: object) -> npt.NDArray[Any] | None:
    """Return a value as a plain array: also one of another library, by DLPack or `__array__`."""
    array = as_array(value)
    return array if is_plain_array(array) else None


def mend_of_array(value: object) -> str:
    """Return how to make a plain array of a value."""
    if isinstance(value, np.ma.MaskedArray):
        return "give array.filled(number), and np.ma.getmaskarray(array) as a separate array"
    return "convert it in the data source with np.asarray(...)"


def _not_an_array(name: str, value: object, at: str, expected: str) -> str:
    return (
        f"batch[{name!r}]{at}: expected {expected}a numpy array, came {type(value).__name__};"
        f" {mend_of_array(value)}"
    )


def shown(value: npt.NDArray[Any]) -> str:
    """Return type and shape of an array, for messages."""
    order = "" if value.dtype.isnative else "byte-swapped "
    return f"{order}{value.dtype.name}[{', '.join(map(str, value.shape))}]"


def listed(names: Any) -> str:
    """Return names, for messages."""
    return ", ".join(repr(name) for name in names) or "nothing"


def _at(where: str) -> str:
    return f" ({where})" if where else ""


def position_state(kind: str, batches: int) -> dict[str, Any]:
    """Return the state of a source whose position is the number of batches it has returned."""
    return {"kind": kind, "batches": batches}


def position_of(state: Mapping[str, Any], kind: str) -> int:
    """Return the number of batches in a state made by `position_state`.

    Raises:
        DataError: the state belongs to another kind of source, or is damaged.
    """
    batches = state.get("batches")
    if (
        state.get("kind") != kind
        or not isinstance(batches, int)
        # A bool is an int in Python.
        or isinstance(batches, bool)
        or batches < 0
    ):
        raise DataError(
            f"data source: expected a state {{'kind': {kind!r}, 'batches': n >= 0}}, came"
            f" {repr(dict(state))[:200]}; restore with the kind of source that wrote the checkpoint"
        )
    return batches


def positive(name: str, value: object) -> int:
    """Return `value` if it is an integer above 0.

    Raises:
        DataError: it is not; the message names the argument.
    """
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value > 0:
        return int(value)
    raise DataError(f"data source: expected {name}= to be an integer above 0, came {value!r}")


def checked_seed(value: object) -> int:
    """Return a seed of random numbers that are drawn. Raises DataError unless it has 64 bits."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        seed: int = int(value)
        if -(1 << 63) <= seed < 1 << 63:
            return seed
    raise DataError(f"pipeline: expected seed= to be an integer below 2^63, came {value!r}")


def content_hash(array: npt.NDArray[Any]) -> str:
    """Return the xxh3_128 of an array's dtype, shape and elements in row-major order, in hex.

    Reads the array once, in chunks of at most 16 MiB or one row, so a memory-mapped file is never
    loaded whole; layout in memory does not matter.
    """
    hasher = xxhash.xxh3_128(f"{array.dtype.str}{array.shape}".encode())
    # 1 for empty arrays, so that neither division is by 0.
    row_bytes = max(1, array.nbytes // max(1, len(array)))
    step = max(1, _CHUNK_BYTES // row_bytes)
    for first in range(0, len(array), step):
        chunk = np.ascontiguousarray(array[first : first + step])
        hasher.update(chunk.reshape(-1).view(np.uint8).data)
    return str(hasher.hexdigest())


MakeIterator = Callable[[], Iterator[Any]]
Specs = Mapping[str, TensorType] | Sequence[Mapping[str, TensorType]]


def from_iterable(
    batches: MakeIterator | Iterable[Any],
    spec: Specs | None = None,
    *,
    names: Sequence[str] = ("x", "y"),
    fingerprint: str = "",
) -> IterableSource:
    """Make a data source of what iterates over batches, such as a DataLoader of torch.

    Args:
        batches: what can be iterated again and again, or a function without arguments that starts
            the iteration from its beginning; the same batches must come each time, or a resumed
            run is not the same run. A batch is a dict of arrays, or a tuple of them.
        spec: the type of every array of a batch; or several such, of batches of several shapes.
            None takes that of the first batch.
        names: of the arrays of a tuple.
        fingerprint: what identifies the data, such as a version; nothing can be hashed here.

    Raises:
        DataError: `batches` can be iterated only once, or `spec` is no mapping to TensorTypes.
    """
    if callable(batches):
        return IterableSource(batches, spec, tuple(names), fingerprint, line_of(batches))
    if isinstance(batches, Iterator) or not isinstance(batches, Iterable):
        raise DataError(
            "from_iterable: expected a function that starts the iteration, so that a resumed run"
            f" can start it again, came {type(batches).__name__}; give lambda: iter(batches)"
        )
    made = IterableSource(
        partial(iter, batches), spec, tuple(names), fingerprint, type(batches).__name__
    )
    made.sized = batches if isinstance(batches, Sized) else None
    return made


def as_source(data: Any) -> Any:
    """Return a data source; of a loader, which has a length and can be iterated anew, one of it.

    What is neither is returned as it is.
    """
    is_loader = isinstance(data, Iterable) and isinstance(data, Sized)
    is_other = isinstance(data, (Iterator, Mapping, Sequence, np.ndarray, type))
    if not is_loader or is_other or hasattr(data, "spec") or hasattr(data, "__array__"):
        return data
    return from_iterable(data)


class IterableSource:
    """The source that `from_iterable` makes. Its position is the number of batches taken.

    Every batch is checked against the spec, of several against the one of its shapes; the message
    names the line of the user's function. `spec()` is the first one.
    """

    def __init__(
        self,
        make_iterator: MakeIterator,
        spec: Specs | None,
        names: tuple[str, ...],
        fingerprint: str,
        where: str,
    ) -> None:
        self._make_iterator, self._names, self._where = make_iterator, names, where
        several = spec if isinstance(spec, (list, tuple)) else [spec]
        self._declared = None if spec is None else tuple([checked_spec(one) for one in several])
        if self._declared == ():
            raise DataError("from_iterable: expected a spec or several, came an empty list")
        self._given_fingerprint = fingerprint
        self.sized: Sized | None = None
        """What has the number of batches, where something has."""
        self._iterator: Iterator[Any] | None = None
        self._batches = 0

    @property
    def _specs(self) -> tuple[dict[str, TensorType], ...]:
        if self._declared is None:
            iterator = self._started()
            first = next(iterator, None)
            if first is None:
                raise DataError(f"from_iterable ({self._where}): there is no batch")
            self._declared = (spec_of(self._named(first), self._where),)
            if self._iterator is None:  # it goes on from there, so no batch is made twice
                self._iterator = itertools.chain([first], iterator)
        return self._declared

    def _named(self, batch: Any) -> Mapping[str, Any]:
        if isinstance(batch, (tuple, list)) and len(batch) == len({*self._names}):
            return dict(zip(self._names, batch, strict=True))
        if isinstance(batch, (tuple, list)):
            raise DataError(
                f"from_iterable ({self._where}): expected a dict or a tuple of {len(self._names)}"
                f" arrays ({listed(self._names)}), came one of {len(batch)}; give"
                " from_iterable(..., names=) a name of its own for each"
            )
        named: Mapping[str, Any] = batch
        return named

    def spec(self) -> dict[str, TensorType]:
        """Return the types that were given, of several the first; or those of the first batch."""
        return dict(self._specs[0])

    def specs(self) -> tuple[dict[str, TensorType], ...]:
        """Return all types that were given."""
        return self._specs

    def _repr_html_(self) -> str:
        types = {} if self._declared is None else self._declared[0]
        return html_table("IterableSource", {"made at": self._where, **types})

    def __bool__(self) -> bool:
        """Whether there is a source; how many batches it has, `len` says where that is known."""
        return True

    def __len__(self) -> int:
        """Batches from the start to the end. Raises TypeError where nothing says how many."""
        if self.sized is None:
            raise TypeError("a source of a function has no length")
        return len(self.sized)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return the iterator's next batch, checked.

        Raises:
            StopIteration: the iterator is at its end.
            DataError: the batch is not of the spec.
        """
        # Started at the first batch and not before: `restore` may come first.
        if self._iterator is None:
            self._iterator = self._started()
        batch = self._named(next(self._iterator))
        place_of_spec(batch, self._specs, self._where)
        # After the check: a batch that was refused does not count as returned.
        self._batches += 1
        return batch

    def state(self) -> dict[str, Any]:
        """Return the number of batches returned so far."""
        return position_state("iterable", self._batches)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Start the iteration again and skip the batches counted in `state`.

        O(n) in the number of batches skipped: each is made and thrown away. A source that can seek
        (`Tokens`, `ArraySource`, or your own with `restore`) resumes at once.

        Raises:
            DataError: the state is of another kind of source, or the iterator ends before it.
        """
        batches = position_of(state, "iterable")
        iterator = self._started()
        # Skipped batches are not checked: they were when they were trained on.
        for skipped in range(batches):
            if next(iterator, None) is None:
                raise DataError(
                    f"from_iterable ({self._where}): the state is after batch {batches}, and the"
                    f" iterator ended after {skipped}; it must give the same batches each time"
                )
        self._iterator = iterator
        self._batches = batches

    def fingerprint(self) -> str:
        """Return the fingerprint given and a hash of the spec; the content is not known."""
        texts = [
            "".join(f"{name}:{type_};" for name, type_ in sorted(spec.items()))
            for spec in self._specs
        ]
        types = "|".join(texts)
        return f"iterable:{xxhash.xxh3_128(types.encode()).hexdigest()}:{self._given_fingerprint}"

    def _started(self) -> Iterator[Any]:
        iterator = self._make_iterator()
        if not isinstance(iterator, Iterator):
            raise DataError(
                f"from_iterable ({self._where}): expected an iterator, came"
                f" {type(iterator).__name__}; give lambda: iter(batches)"
            )
        return iterator


def line_of(function: object) -> str:
    """Return the file and line of a function of the user, for messages."""
    code = getattr(function, "__code__", None)
    if code is None:
        return str(getattr(function, "__qualname__", type(function).__name__))
    return f"{code.co_filename}:{code.co_firstlineno}"
