"""Worker processes make what this process would make, whatever happens to them."""

import contextlib
import gc
import itertools
import os
import signal
import threading
import time

import numpy as np
import pytest
import sample_functions as functions
from error_texts import raises

import actorflow as af
from actorflow.data import DataError
from actorflow.data.reading import recipe_of
from actorflow.data.recipe import ReadUnit
from actorflow.data.workers import Workers

WAIT_S = 60


def numbers(length=64):
    return af.data.from_arrays({"n": np.arange(length)})


@pytest.fixture
def ending():
    """Return a function that has the workers of a pipeline ended with the test."""
    with contextlib.ExitStack() as stack:

        def note(pipeline):
            stack.callback(pipeline.end_workers)
            return pipeline

        yield note


def bits(batches):
    return [{name: array.tobytes() for name, array in batch.items()} for batch in batches]


def wait_until_gone(pids):
    until = time.monotonic() + WAIT_S
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < until, "a worker process is left"
        time.sleep(0.01)  # watches other processes


@pytest.mark.parametrize("keeps", [False, True])
def test_any_number_of_workers_gives_the_same_batches_from_any_position(ending, keeps):
    base = numbers().shuffle(1).map(functions.noisy)
    base = base.filter(functions.is_kept) if keeps else base
    alone = base.repeat().batch(8).map(functions.mixed)
    expected = bits(itertools.islice(alone, 20))
    workers = ending(alone.workers(2))
    assert bits(itertools.islice(workers, 9)) == expected[:9]
    state = workers.state()
    os.kill(workers.worker_pids[0], signal.SIGKILL)
    assert bits(itertools.islice(workers, 7)) == expected[9:16]
    workers.restore(state)
    assert bits(itertools.islice(workers, 11)) == expected[9:]
    other = alone.workers(0)
    other.restore(state)
    assert bits(itertools.islice(other, 11)) == expected[9:]


def test_workers_make_batches_of_bfloat16(ending):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    own = np.arange(8).astype(bfloat16)
    (batch,) = ending(af.data.from_arrays({"x": own}).batch(8).workers(1))
    assert (batch["x"].dtype, batch["x"].tolist()) == (bfloat16, own.tolist())


def test_workers_make_the_rows_of_any_part_of_a_batch(ending):
    masked = numbers(19).batch(8, drop_last=False, mask="counts")
    packed = numbers(19).map(functions.words).pack(9, batch=8)
    for alone in (masked, packed):
        data, whole = ending(alone.workers(1)), list(alone)
        for rows in (slice(0, 4), slice(4, 8), slice(0, 8), slice(2, 3)):
            data.restore({"kind": "pipeline", "batches": 0})
            size = rows.stop - rows.start
            out = {n: np.empty((size, *a.shape[1:]), a.dtype) for n, a in whole[0].items()}
            for batch in whole:
                data.next_rows_into(out, dict.fromkeys(out, rows))
                assert bits([out]) == bits([{n: a[rows] for n, a in batch.items()}])
        pids = data.worker_pids
        assert len(pids) == 1


def test_an_error_in_a_worker_names_the_sample_and_has_the_workers_traceback(ending):
    data = ending(numbers().map(functions.broken).batch(4).workers(1))
    data.restore({"kind": "pipeline", "batches": 2})
    assert next(data)["n"].tolist() == [8, 9, 10, 11]
    with raises(DataError) as caught:
        next(data)
    assert 'raise ValueError("unlucky")' in "".join(caught.value.__notes__)
    with raises(DataError):
        next(data)  # again: the position is that after the last batch
    skipping = ending(numbers().map(functions.broken).on_error("skip").batch(4).workers(1))
    assert [next(skipping)["n"].tolist() for _ in range(4)][3] == [12, 14, 15, 16]


def test_a_worker_that_is_killed_over_a_sample_is_tried_again(ending, tmp_path, monkeypatch):
    monkeypatch.setenv("MARK_OF_DEATH", str(tmp_path / "mark"))
    data = ending(numbers().map(functions.dies_once).batch(4).workers(2))
    assert [b["n"].tolist() for b in data] == np.arange(64).reshape(16, 4).tolist()
    assert (tmp_path / "mark").exists()


def test_a_worker_that_is_killed_while_it_starts_is_started_again():
    workers = Workers(recipe_of(numbers().batch(4).batched()), 1)
    try:
        os.kill(workers.pids[0], signal.SIGKILL)
        (batch,) = workers.run(iter([ReadUnit(np.arange(4), np.zeros(4, int))]))
        assert batch["n"].tolist() == [0, 1, 2, 3]
    finally:
        workers.end()


def test_a_sample_that_kills_every_worker_is_named(ending):
    data = ending(numbers(16).map(functions.dies).batch(4).workers(1))
    assert len([next(data) for _ in range(3)]) == 3
    with raises(DataError):
        next(data)


def test_workers_that_are_replaced_or_ended_leave_no_file_open(ending):
    data, counts = ending(numbers().repeat().batch(4).workers(1)), []
    next(data)
    for _ in range(3):
        os.kill(data.worker_pids[0], signal.SIGKILL)
        for _ in range(6):
            next(data)
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert len({*counts}) == 1
    data.end_workers()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < counts[0]


def test_a_forked_child_leaves_the_workers_alone(ending):
    data = ending(numbers().batch(4).workers(1))
    next(data)
    child = os.fork()
    if not child:
        status = 1
        try:
            data.end_workers()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert next(data)["n"].tolist() == [4, 5, 6, 7]


def test_what_cannot_travel_is_told():
    with raises(DataError):
        next(numbers().map(lambda s: s).batch(4).workers(1))


def test_large_arrays_lie_in_memory_once(ending):
    zeros = np.zeros((1 << 14, 1 << 10), np.float32)  # 64 MiB
    data = ending(af.data.from_arrays({"x": zeros}).batch(4).workers(2))
    next(data)
    for pid in data.worker_pids:
        with open(f"/proc/{pid}/status") as file:
            fields = dict(line.split(":", 1) for line in file)
        assert int(fields["RssAnon"].split()[0]) < 160 << 10  # Python and numpy, in KiB


def test_a_pipeline_that_nobody_has_leaves_no_process():
    data = numbers().batch(4).workers(2)
    next(data)
    pids = data.worker_pids
    gc.disable()  # no cycle keeps them until it is found
    try:
        del data
        wait_until_gone(pids)
    finally:
        gc.enable()


def test_workers_that_start_after_the_end_of_the_data_say_nothing(capfd):
    assert len(list(numbers(1).batch(1).workers(3))) == 1
    assert capfd.readouterr() == ("", "")


def test_the_end_of_the_data_ends_the_workers():
    data = numbers(8).batch(4).workers(1)
    assert len(list(data)) == 2
    assert data.worker_pids == ()


def test_another_thread_can_end_a_wait(ending):
    data = ending(numbers().map(functions.never_returns).batch(4).workers(1))
    data.restore({"kind": "pipeline", "batches": 3})
    caught = []

    def read():
        try:
            next(data)
        except DataError as error:
            caught.append(str(error))

    data.spec()
    reader = threading.Thread(target=read)
    reader.start()
    while not data.worker_pids:
        time.sleep(0.001)  # until the other thread has begun
    pids = data.worker_pids
    data.close()
    reader.join(WAIT_S)
    assert caught == ["pipeline: closed while a batch was waited for"]
    wait_until_gone(pids)
