"""A run that cannot start says why, leaves nothing behind, and can be started again."""

import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow.checkpoint.errors import CheckpointLocked
from actorflow.checkpoint.manager import CheckpointManager
from actors.kernels.common import host_memory

THREADS = ("data", "metrics", "checkpoint", "dispatch", "watchdog")
SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path, new_threads):
    """No thread, no lock and no handler of a run is left, however it ended."""
    before = [signal.getsignal(s) for s in SIGNALS]
    yield
    assert not new_threads()
    assert [signal.getsignal(s) for s in SIGNALS] == before
    with CheckpointManager(tmp_path / "run"):
        pass


@pytest.fixture
def broken_start(monkeypatch):
    """Let the start of one thread of the next run raise; `after` lets the thread live first."""
    start = threading.Thread.start

    def break_(name, error, *, after=False):
        def start_or_not(thread):
            if thread.name == f"actorflow-{name}":
                if after:
                    start(thread)
                raise error
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_or_not)

    break_.mend = monkeypatch.undo
    return break_


@pytest.fixture
def job(mlp, classification, classify, tmp_path, monkeypatch):
    """Ways to run a job on one model, each for a step more than are done."""

    class Ways:
        def __init__(self):
            self.train, self.model, self.data = classify(), mlp(), classification()

        def fit(self):
            run = tmp_path / "run"
            self.train.fit(
                self.model, classification(), steps=2, checkpoint=run, every=1, progress=False
            )

        def stream(self):
            for _ in self.train.stream(self.model, self.data, steps=1):
                pass

        def step(self):
            self.train.step(self.model, next(self.data))
            self.train.close(self.model)

    return Ways()


@pytest.mark.parametrize("name", THREADS)
def test_a_fit_that_gets_no_thread_says_so_and_can_be_done_again(job, broken_start, name):
    broken_start(name, RuntimeError("can't start new thread"))
    with raises(af.DeviceError):
        job.fit()
    broken_start.mend()
    job.fit()


@pytest.mark.parametrize("name", ["data", "dispatch"])
def test_a_stream_that_gets_no_thread_too(job, broken_start, name):
    broken_start(name, RuntimeError("can't start new thread"))
    with raises(af.DeviceError):
        job.stream()
    broken_start.mend()
    job.stream()


@pytest.mark.host("a device has streams of its own")
@pytest.mark.one_device("several have streams")
def test_a_step_takes_no_thread(job, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        job.step()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", ["data", "metrics", "dispatch", "watchdog"])
def test_an_interrupt_in_the_middle_of_a_start_leaves_no_thread(job, broken_start, name, after):
    broken_start(name, KeyboardInterrupt(), after=after)
    for way in (job.fit,) if name == "watchdog" else (job.fit, job.stream):
        with pytest.raises(KeyboardInterrupt):
            way()
    broken_start.mend()
    for way in (job.fit, job.step, job.stream):
        way()


def refuse(*_):
    raise MemoryError


@pytest.mark.no_gpu("its driver gives the memory, and has tests of its own")
def test_an_arena_that_is_not_given_is_out_of_memory(job, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "np", SimpleNamespace(**{**vars(np), "empty": refuse}))
        with pytest.raises(af.OutOfMemory, match="which the machine cannot allocate"):
            job.step()
    job.step()


def test_what_a_source_raises_before_the_start_comes_out_as_itself(job, classification):
    class Shy:
        def __init__(self):
            self.source, self.asked = classification(), 0

        def __getattr__(self, name):
            return getattr(self.source, name)

        def spec(self):
            self.asked += 1
            if self.asked == 2:
                raise PermissionError("not now")
            return self.source.spec()

    with pytest.raises(PermissionError, match="not now"):
        job.train.fit(job.model, Shy(), steps=2, progress=False)
    job.fit()


def test_a_directory_that_another_run_holds_is_refused_before_anything_starts(job, tmp_path):
    with (
        CheckpointManager(tmp_path / "run"),
        pytest.raises(CheckpointLocked),
    ):
        job.fit()
    job.fit()


@pytest.mark.parametrize("way", ["fit", "stream"])
def test_a_process_that_got_no_thread_can_end(start_python, way):
    program = start_python(
        """
        import sys, threading
        import numpy as np
        import actorflow as af
        from actorflow import nn

        train = af.job(lambda model, batch: model(batch.x).mean(), optimizer=af.optim.SGD(0.1))
        data = af.data.ArraySource({"x": np.ones((8, 2), np.float32)}, batch=4)
        model = nn.Linear(2, 2)
        train.step(model, next(data))  # whatever is built or measured, is
        train.close(model)

        def run(way):
            if way == "fit":
                train.fit(model, data, steps=2, checkpoint="run")
            else:
                list(train.stream(model, data, steps=2))

        threading.stack_size(1 << 46)  # the system has no room for such a thread
        try:
            run(sys.argv[1])
        except af.DeviceError as error:
            print(f"DeviceError: {error}", threading.active_count(), flush=True)
        threading.stack_size(0)
        run(sys.argv[1])
        print("done", flush=True)
        """,
        way,
    )
    line = program.until("DeviceError")
    assert line.startswith("DeviceError: the system refuses a thread to this run, which needs")
    assert line.endswith(" 1")
    program.until("done")
    code, _, err = program.finish()
    assert (code, err) == (0, "")
