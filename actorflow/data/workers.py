"""Processes that make batches: the same ones in the same order for any number of processes.

    units ──▶ to the worker with a free slot ──▶ arrays in memory that both have ──▶ in order again

A worker is started by "spawn", so it has none of this process's threads and locks; it gets the
recipe once, pickled, whose large arrays lie in memory that all workers share. A worker writes what
it makes into a slot: a file without a name, mapped by both sides, which no kill leaves behind.
Whoever is killed is started again, and makes its units again: a unit has no state. A worker ends
when the pipe to it ends, so none outlives this process.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import tempfile
import threading
import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from mmap import mmap
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np

from actorflow.data.recipe import Arrays, BatchRecipe, ReadUnit, SampleOutcome
from actorflow.data.samples import SampleError
from actorflow.data.source import DataError

SLOTS = 2
"""Units that a worker has at a time: it makes one while the other is fetched."""

MOST_DEATHS = 3
"""How often a worker may die over one unit before that is the unit's fault."""

UnitResult = Arrays | list[SampleOutcome]


class SharedFile:
    """Bytes of a file without a name, that grow, and that another process maps as well."""

    def __init__(self) -> None:
        self._open(_nameless())

    def _open(self, fd: int) -> None:
        self.fd = fd
        self._map: mmap | None = None
        self._closer = weakref.finalize(self, os.close, fd)  # also of a worker that was replaced

    def map(self, size_bytes: int) -> mmap:
        """Return the bytes, at least that many; the file grows as it needs to."""
        if self._map is None or len(self._map) < size_bytes:
            if os.fstat(self.fd).st_size < size_bytes:
                os.ftruncate(self.fd, size_bytes)
            self._map = mmap(self.fd, os.fstat(self.fd).st_size)
        return self._map

    def close(self) -> None:
        """Close the file; what is mapped stays until nobody uses it."""
        self._closer()

    def __getstate__(self) -> Any:
        """Travel to a process that is being started."""
        return DupFd(self.fd)

    def __setstate__(self, handle: Any) -> None:
        """Open what another process has sent."""
        self._open(handle.detach())


def _nameless() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("actorflow-data")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


# What lies in a slot: arrays one after the other, each at a multiple of 64 bytes.

_Place = tuple[np.dtype[Any], tuple[int, ...], int]
_Layout = list[tuple[dict[str, _Place] | None, str]]


def _put(slot: SharedFile, made: UnitResult) -> tuple[bool, _Layout]:
    """Write what was made into a slot; return whether it is a batch, and where its arrays lie."""
    rows = made if isinstance(made, list) else [SampleOutcome(made)]
    layout: _Layout = []
    end = 0
    for row in rows:
        entry: dict[str, _Place] | None = None
        if row.arrays is not None:
            entry = {}
            for name, array in row.arrays.items():
                entry[name] = (array.dtype, array.shape, end)
                end += -(-array.nbytes // 64) * 64
        layout.append((entry, row.why))
    content = slot.map(max(end, 1))
    for row, (entry, _) in zip(rows, layout, strict=True):
        for name in entry or ():
            array = (row.arrays or {})[name]
            np.copyto(_view(content, *(entry or {})[name]), array)
    return not isinstance(made, list), layout


def _get(slot: SharedFile, is_batch: bool, layout: _Layout) -> UnitResult:
    """Return what lies in a slot: a batch as views of it, and samples as copies."""
    size = max([_end_of(at) for entry, _ in layout for at in (entry or {}).values()], default=1)
    content = slot.map(max(size, 1))
    if is_batch:
        entry = layout[0][0] or {}
        return {name: _view(content, *at) for name, at in entry.items()}
    return [
        SampleOutcome(
            None if e is None else {n: _view(content, *at).copy() for n, at in e.items()}, why
        )
        for e, why in layout
    ]


def _end_of(at: _Place) -> int:
    dtype, shape, begin = at
    return begin + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def _view(content: mmap, dtype: np.dtype[Any], shape: tuple[int, ...], begin: int) -> Any:
    return np.ndarray(shape, dtype, content, begin)


@dataclass(frozen=True, slots=True)
class PackedRecipe:
    """A recipe as bytes, with its large arrays beside them."""

    content: bytes
    file: SharedFile
    parts: tuple[tuple[int, int], ...]

    @staticmethod
    def of(recipe: BatchRecipe) -> PackedRecipe:
        """Pack a recipe. Raises DataError where a function or a dataset of it cannot travel."""
        buffers: list[pickle.PickleBuffer] = []
        try:
            content = pickle.dumps(recipe, protocol=5, buffer_callback=buffers.append)
        except Exception as error:
            raise DataError(
                f"pipeline: .workers() sends what it reads to other processes, and that failed:"
                f" {error}; define functions by def at the top of a module, not as a lambda or"
                " inside of another function, or leave out .workers()"
            ) from error
        file, parts, end = SharedFile(), [], 0
        raws = [buffer.raw() for buffer in buffers]
        for raw in raws:
            parts.append((end, end + raw.nbytes))
            end += -(-raw.nbytes // 64) * 64
        shared = file.map(max(end, 1))
        for raw, (begin, last) in zip(raws, parts, strict=True):
            shared[begin:last] = raw
        return PackedRecipe(content, file, tuple(parts))

    def open(self) -> BatchRecipe:
        """Return the recipe, whose large arrays lie in the shared memory."""
        view = memoryview(self.file.map(1)).toreadonly()
        recipe: BatchRecipe = pickle.loads(  # from this process's parent
            self.content, buffers=[view[begin:end] for begin, end in self.parts]
        )
        return recipe


def _end_with_parent() -> None:
    # A function of the user that does not return would outlive the process that wants its result.
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def serve(connection: Connection, packed: PackedRecipe, slots: Sequence[SharedFile]) -> None:
    """Make units until the pipe ends. What is raised goes back as text."""
    os.setpgid(0, 0)  # ^C and a stop of the group are for the process that started this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    recipe = packed.open()
    with suppress(OSError):  # the data may have ended already
        connection.send(None)
    while True:
        try:
            number, slot, unit = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer: tuple[Any, ...] = (number, True, *_put(slots[slot], recipe.make(unit)))
        except DataError as error:
            cause = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ else ""
            kind = SampleError if isinstance(error, SampleError) else DataError
            answer = (number, False, kind, str(error), cause)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            answer = (number, False, DataError, text, traceback.format_exc())
        try:
            connection.send(answer)
        except OSError:
            return


@dataclass(slots=True, eq=False)
class _DataWorker:
    process: Any
    connection: Connection
    slots: list[SharedFile]
    free: list[int]
    tasks: dict[int, tuple[int, ReadUnit]] = field(default_factory=dict)
    """The slot of each unit that it has, by the unit's number, and the unit."""
    is_ready: bool = False


@dataclass(slots=True)
class _Answer:
    """What a worker made of a unit, in which of its slots; or the error's text and its cause."""

    worker: _DataWorker
    slot: int
    layout: _Layout = field(default_factory=list)
    is_batch: bool = False
    error: DataError | None = None


class Workers:
    """Some worker processes that make units of one recipe. For one thread, but `close`.

    Args:
        recipe: of what is made.
        count: processes.
    """

    def __init__(self, recipe: BatchRecipe, count: int) -> None:
        self._packed = PackedRecipe.of(recipe)
        self._context = multiprocessing.get_context("spawn")
        self._is_closed = False
        self._wake_read, self._wake_write = self._context.Pipe(duplex=False)
        self._deaths: dict[int, int] = {}
        self._unready = 0
        """Workers that died before they were ready, one after the other."""
        self._answers: dict[int, _Answer] = {}
        self._next = 0
        """The number of the next unit: each has its own, also after a restart of the sequence."""
        self._workers: list[_DataWorker] = []
        pipes = (self._wake_read, self._wake_write)
        # The end of its pipe ends a worker. A child that was forked off has no part in them.
        self._finalizer = weakref.finalize(
            self, _end, os.getpid(), self._workers, self._packed, pipes
        )
        for _ in range(count):
            self._workers.append(self._started())

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that there are now."""
        return tuple([worker.process.pid for worker in self._workers])

    def run(self, units: Iterator[ReadUnit]) -> Iterator[UnitResult]:
        """Yield what is made of each unit, in their order; valid until the next one is asked for.

        Units are taken ahead, as many as there are slots. What an earlier call has begun and not
        yielded is forgotten. Raises DataError: that of a unit, in its turn; and where a worker
        cannot be started, or dies over one unit again and again.
        """
        turn = self._next
        for left in self._answers.values():
            left.worker.free.append(left.slot)
        self._answers.clear()
        is_over = False
        while True:
            while not is_over and (worker := self._idle()) is not None:
                unit = next(units, None)
                if unit is None:
                    is_over = True
                else:
                    self._send(worker, self._next, unit)
                    self._next += 1
            if is_over and turn == self._next:
                return
            if turn not in self._answers:
                self._hear(turn)
                continue
            answer = self._answers.pop(turn)
            turn += 1
            try:
                if answer.error is not None:
                    raise answer.error
                yield _get(answer.worker.slots[answer.slot], answer.is_batch, answer.layout)
            finally:
                answer.worker.free.append(answer.slot)

    def close(self) -> None:
        """Make the thread that waits for a unit raise DataError. From any thread."""
        self._is_closed = True
        with suppress(OSError):  # they have ended
            self._wake_write.send_bytes(b"")

    def end(self) -> None:
        """End the processes."""
        self._finalizer()

    def _started(self) -> _DataWorker:
        slots = [SharedFile() for _ in range(SLOTS)]
        own, other = self._context.Pipe()
        process = self._context.Process(
            target=serve, args=(other, self._packed, slots), daemon=True, name="actorflow-data"
        )
        process.start()
        other.close()
        return _DataWorker(process, own, slots, list(range(SLOTS)))

    def _idle(self) -> _DataWorker | None:
        """Return the worker with the most free slots, of equals the first; None for none."""
        worker = max(self._workers, key=lambda worker: len(worker.free))
        return worker if worker.free else None

    def _send(self, worker: _DataWorker, number: int, unit: ReadUnit) -> None:
        slot = worker.free.pop()
        worker.tasks[number] = (slot, unit)
        # A worker that has died is heard of when its answers are waited for.
        with suppress(OSError):
            worker.connection.send((number, slot, unit))

    def _hear(self, turn: int) -> None:
        """Wait for an answer, or a death, of any worker."""
        by_connection = {worker.connection: worker for worker in self._workers}
        ready = wait([*by_connection, self._wake_read])
        if self._is_closed:
            raise DataError("pipeline: closed while a batch was waited for")
        for connection in ready:
            worker = by_connection[connection]  # type: ignore[index]  # a connection, not the pipe
            try:
                message = worker.connection.recv()
            except (EOFError, OSError):
                self._replace(worker)
                continue
            if message is None:
                worker.is_ready, self._unready = True, 0
                continue
            number, *told = message
            slot, _ = worker.tasks.pop(number)
            self._deaths.pop(number, None)
            if number < turn:  # of a sequence that was left
                worker.free.append(slot)
            else:
                self._answers[number] = _answer(worker, slot, *told)

    def _replace(self, worker: _DataWorker) -> None:
        """Start another process in place of one that has died, with what it had to do."""
        worker.process.join()
        worker.connection.close()
        code = worker.process.exitcode
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        if not worker.is_ready:
            self._unready += 1
        # One that is killed while it starts may be started again; one that ends itself ends again.
        if not worker.is_ready and (code >= 0 or self._unready == MOST_DEATHS):
            raise DataError(
                f"pipeline: a worker process ended {how} before it was ready; what it printed says"
                " why. A worker imports the script: what starts a run has to stand under"
                ' if __name__ == "__main__":'
            )
        # Units are made in their order: it was making the first that it had.
        current = min(worker.tasks, default=-1)
        self._deaths[current] = self._deaths.get(current, 0) + worker.is_ready
        if current in worker.tasks and self._deaths[current] >= MOST_DEATHS:
            numbers = worker.tasks[current][1].numbers
            raise DataError(
                f"pipeline: {MOST_DEATHS} worker processes ended {how} while they had the samples"
                f" {', '.join(map(str, numbers[:8].tolist()))}{', ...' * (len(numbers) > 8)}; read"
                " them without .workers() to see why"
            )
        logging.getLogger("actorflow").warning("a data worker ended %s and is started again", how)
        fresh = self._started()
        self._workers[self._workers.index(worker)] = fresh
        for number, (_, unit) in sorted(worker.tasks.items()):
            self._send(fresh, number, unit)


def _answer(worker: _DataWorker, slot: int, is_made: bool, *told: Any) -> _Answer:
    if is_made:
        return _Answer(worker, slot, is_batch=told[0], layout=told[1])
    kind, text, cause = told
    error = kind(text)
    if cause:
        error.add_note(f"in a worker process:\n{cause}")
    return _Answer(worker, slot, error=error)


def _end(
    pid: int,
    workers: list[_DataWorker],
    packed: PackedRecipe,
    pipes: tuple[Connection, Connection],
) -> None:
    if os.getpid() != pid:
        return
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        worker.process.join(_END_S)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        for slot in worker.slots:
            slot.close()
    packed.file.close()
    for pipe in pipes:
        pipe.close()


_END_S = 2.0
"""How long a worker may take to end its unit when nobody wants it any more."""
