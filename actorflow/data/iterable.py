"""Any iterator of dicts as a data source; resumed by counting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import numpy.typing as npt
import xxhash

from actorflow.data.source import DataError, check_batch, checked_spec, position_of, position_state
from compiler.types import TensorType

MakeIterator = Callable[[], Iterator[Mapping[str, npt.NDArray[Any]]]]


def from_iterable(
    make_iterator: MakeIterator, spec: Mapping[str, TensorType], *, fingerprint: str = ""
) -> IterableSource:
    """Make a data source of the user's own iterator.

    Args:
        make_iterator: a function without arguments that starts the iteration from its beginning;
            the same batches must come each time, or a resumed run is not the same run.
        spec: the type of every array of a batch.
        fingerprint: what identifies the data, such as a version; nothing can be hashed here.

    Raises:
        DataError: `make_iterator` cannot be called, or `spec` is no mapping to TensorTypes.
    """
    if not callable(make_iterator):
        raise DataError(
            "from_iterable: expected a function that starts the iteration, so that a resumed run"
            f" can start it again, came {type(make_iterator).__name__}; give lambda: iter(batches)"
        )
    return IterableSource(make_iterator, spec, fingerprint)


class IterableSource:
    """The source that `from_iterable` makes. Its position is the number of batches taken.

    Every batch is checked against the spec; the message names the line of the user's function.
    """

    def __init__(
        self, make_iterator: MakeIterator, spec: Mapping[str, TensorType], fingerprint: str
    ) -> None:
        self._make_iterator = make_iterator
        self._spec = checked_spec(spec)
        self._given_fingerprint = fingerprint
        self._where = _line_of(make_iterator)
        self._iterator: Iterator[Mapping[str, npt.NDArray[Any]]] | None = None
        self._batches = 0

    def spec(self) -> dict[str, TensorType]:
        """Return the types that were given."""
        return dict(self._spec)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return the iterator's next batch, checked.

        Raises:
            StopIteration: the iterator is at its end.
            DataError: the batch is not of the spec.
        """
        if self._iterator is None:
            self._iterator = self._started()
        batch = next(self._iterator)
        check_batch(batch, self._spec, self._where)
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
        types = "".join(f"{name}:{of};" for name, of in sorted(self._spec.items()))
        return f"iterable:{xxhash.xxh3_128(types.encode()).hexdigest()}:{self._given_fingerprint}"

    def _started(self) -> Iterator[Mapping[str, npt.NDArray[Any]]]:
        iterator = self._make_iterator()
        if not isinstance(iterator, Iterator):
            raise DataError(
                f"from_iterable ({self._where}): expected an iterator, came"
                f" {type(iterator).__name__}; give lambda: iter(batches)"
            )
        return iterator


def _line_of(function: object) -> str:
    code = getattr(function, "__code__", None)
    if code is None:
        return str(getattr(function, "__qualname__", type(function).__name__))
    return f"{code.co_filename}:{code.co_firstlineno}"
