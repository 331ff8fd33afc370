"""A job that is open to be called by any thread, alone or with the rows of several callers.

predict = scores.predictor(model, {"x": np.zeros((1, 784), np.float32)})
predict({"x": image})["output"]

predict = scores.predictor(model, {"x": np.zeros((32, 784), np.float32)}, max_wait_ms=2)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np

from actorflow.callbacks.protocol import Metrics
from actorflow.data import DataError, spec_of
from actorflow.environment.native import limited_threads
from actorflow.run.open_model import OpenModel
from compiler.contract.errors import CompileError
from compiler.contract.types import TensorType
from compiler.graph.graph import Graph

Array = np.ndarray[Any, Any]
Rows = Mapping[str, Array]

_MOST_WAIT_MS = 86_400_000
"""A day: what a wait of a thread takes for certain."""


class _PendingRows:
    """The rows of one caller, and what came of them."""

    __slots__ = ("count", "error", "outputs", "rows")

    def __init__(self, rows: Rows, count: int) -> None:
        self.rows, self.count = rows, count
        self.outputs: Metrics | None = None
        self.error: BaseException | None = None

    @property
    def is_answered(self) -> bool:
        return self.outputs is not None or self.error is not None


class Predictor:
    """A job that does not train, open for batches of one type; `Job.predictor` makes it.

    A call computes with the model's newest parameters and buffers, as `step` does. All else that
    the job's function reads was read when the predictor was made: unlike `step` it looks at nothing
    before each call. Calls of several threads take turns.

    With `max_wait_ms` a call takes one row or more, up to as many as the example has: a caller
    waits at most so long for rows of others that fill up the batch, and gets those of its own. What
    is then still empty is computed with zeros. So each row of the outputs may depend on the same
    row of the batch alone.

    Predictors of one thread each compute side by side when several threads call them: a launch
    that is cut over the pool's threads runs alone.

    Used as a context manager, or closed by `close`; the model does not keep it.
    """

    def __init__(
        self,
        opened: OpenModel,
        spec: Mapping[str, TensorType],
        where: str,
        max_wait_ms: float | None = None,
        threads: int | None = None,
    ) -> None:
        self._opened, self._spec, self._where = opened, dict(spec), where
        self._arrays = [(n, np.dtype(t.dtype.value), t.shape) for n, t in spec.items()]
        self._threads = threads
        self._turn = threading.RLock()  # a handler of a signal may close it within a call
        self._is_closed = False
        self._max_wait_s = None if max_wait_ms is None else max_wait_ms / 1e3
        # Rows of a batch that callers fill together; 0 where each gives a whole one.
        self._size = 0 if max_wait_ms is None else min([type_.shape[0] for type_ in spec.values()])
        # `_lock` guards what waits for a batch, and whose caller is gathering one. It is taken by
        # itself: to enter a Condition is code of Python, in which a ^C leaves it locked.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._requests: list[_PendingRows] = []
        self._gatherer: _PendingRows | None = None
        self._batch = {n: np.zeros(t.shape, t.dtype.value) for n, t in spec.items() if self._size}
        opened.load()  # so that the first request does not wait for it

    def __call__(self, batch: Rows) -> Metrics:
        """Return the outputs for a batch, or for the rows of one.

        Raises DataError for what is not of the example's type, CompileError when it is closed.
        """
        if self._max_wait_s is None:
            if not self._fits(batch) and (came := spec_of(batch, self._where)) != self._spec:
                raise DataError(
                    f"{self._where}: expected {_listed(self._spec)}, came {_listed(came)}"
                )
            with self._turn:
                return self._step(batch)
        request = _PendingRows(batch, self._count(batch))
        try:
            with self._lock:
                self._requests.append(request)
                self._changed.notify_all()  # whoever gathers may have enough now
            while request.outputs is None:
                if request.error is not None:
                    raise request.error
                self._attend(request, self._max_wait_s)
        finally:
            if request.outputs is None:  # an interrupt: nobody wants the answer
                with self._lock:
                    self._requests = [one for one in self._requests if one is not request]
        return request.outputs

    def close(self) -> None:
        """End the plan and release its memory. Idempotent; a call that is under way ends first."""
        with self._turn:
            if not self._is_closed:
                self._is_closed = True
                self._opened.close()

    def __enter__(self) -> Predictor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _fits(self, batch: Rows) -> bool:
        """Whether a batch is of the example's type as it is: most are, and this is quickly said."""
        if type(batch) is not dict or len(batch) != len(self._arrays):
            return False
        for name, dtype, shape in self._arrays:
            array = batch.get(name)
            if type(array) is not np.ndarray or array.dtype is not dtype or array.shape != shape:
                return False
        return True

    def _step(self, batch: Rows) -> Metrics:
        """Compute a batch; the caller has the turn."""
        if self._is_closed:
            raise CompileError(f"{self._where}: it was closed; make another one")
        # Each time: a step after one that failed opens the plan again.
        with limited_threads(self._threads):
            return self._opened.step([batch])

    def _attend(self, own: _PendingRows, max_wait_s: float) -> None:
        """Wait for the answer to a request, or be the one who gathers a batch and computes it."""
        taken: list[_PendingRows] = []
        try:
            with self._lock:
                if own.is_answered:
                    return
                if self._gatherer is not None or own not in self._requests:
                    self._changed.wait()  # for who gathers, or computes these rows
                    return
                self._gatherer = own
                self._gather(taken, time.monotonic() + max_wait_s)
                self._gatherer = None  # the next one may gather while this batch is computed
                self._changed.notify_all()
            self._answer(taken)
            with self._lock:
                self._changed.notify_all()
        except BaseException:
            # An interrupt is of this caller: others gather, and compute what was taken of them.
            with self._lock:
                if self._gatherer is own:
                    self._gatherer = None
                known = [own, *self._requests]
                left = [one for one in taken if one not in known and not one.is_answered]
                self._requests = left + self._requests
                self._changed.notify_all()
            raise

    def _gather(self, taken: list[_PendingRows], until_s: float) -> None:
        """Wait for a full batch, at most until then, and take the oldest that one batch holds."""
        while sum([request.count for request in self._requests]) < self._size:
            if not self._changed.wait(max(0.0, until_s - time.monotonic())):
                break
        room = self._size
        while self._requests and self._requests[0].count <= room:
            taken.append(self._requests[0])  # first, so that an interrupt loses none of them
            del self._requests[0]
            room -= taken[-1].count

    def _answer(self, requests: list[_PendingRows]) -> None:
        """Compute the rows of some callers; what is raised is the answer of whose rows it is."""
        try:
            with self._turn:
                for name, whole in self._batch.items():
                    rows = [request.rows[name] for request in requests]
                    filled = sum([request.count for request in requests])
                    np.concatenate(rows, out=whole[:filled])
                    whole[filled:] = 0
                outputs = self._step(self._batch)
        except Exception as error:
            for request in requests:
                if len(requests) == 1:
                    request.error = error
                else:  # each by itself, since the rows of one may be at fault
                    self._answer([request])
            return
        begin = 0
        for request in requests:
            end = begin + request.count
            request.outputs = {name: array[begin:end].copy() for name, array in outputs.items()}
            begin = end

    def _count(self, batch: Rows) -> int:
        """Return how many rows a caller gave. Raises DataError for what is no part of a batch."""
        came = spec_of(batch, self._where)
        counts = [type_.shape[0] for type_ in came.values() if type_.shape]
        count = counts[0] if counts else 0
        rows = {n: TensorType(t.dtype, (count, *t.shape[1:])) for n, t in self._spec.items()}
        if came != rows or not 1 <= count <= self._size:
            raise DataError(
                f"{self._where}: expected 1 to {self._size} rows of {_listed(self._spec)}, all"
                f" entries as many; came {_listed(came)}"
            )
        return count


def _listed(spec: Mapping[str, TensorType]) -> str:
    return ", ".join([f"{name!r}: {type_}" for name, type_ in spec.items()]) or "nothing"


def check_rows(
    spec: Mapping[str, TensorType], graph: Graph, max_wait_ms: float | None, where: str
) -> None:
    """Check that rows of several callers can make one batch, where they are to. CompileError."""
    if max_wait_ms is None:
        return
    is_number = isinstance(max_wait_ms, (int, float)) and not isinstance(max_wait_ms, bool)
    if not is_number or not 0 <= max_wait_ms <= _MOST_WAIT_MS:
        raise CompileError(
            f"{where}: expected max_wait_ms= in milliseconds, from 0 to {_MOST_WAIT_MS:,}, came"
            f" {max_wait_ms!r}"
        )
    types = {f"batch[{name!r}]": t for name, t in spec.items()}
    types |= {f"output {o.name!r}": graph.types[o.value] for o in graph.outputs}
    firsts = {type_.shape[:1] for type_ in types.values()}
    if len(firsts) > 1 or () in firsts or not spec:
        text = ", ".join([f"{name}: {list(type_.shape)}" for name, type_ in types.items()])
        raise CompileError(
            f"{where}: with max_wait_ms= rows of several callers make one batch, so every entry of"
            f" the batch and every output has these as its first axis; came {text}"
        )
