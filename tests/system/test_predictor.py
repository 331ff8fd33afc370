"""`job.predictor`: a job that is open to be called, by several threads, also in one batch."""

import gc
import inspect
import linecache
import os
import signal
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.data import DataError
from actorflow.jobs.job import Job
from actorflow.run.predictor import Predictor
from actorflow.run.runner import Runner
from compiler.contract.errors import CompileError

WAIT_MS = 60_000
"""Longer than any test: a batch that is not full by then never was."""


class Net(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)


@af.job(train=False)
def scores(model, batch):
    return {"y": model.down(af.tanh(model.up(batch.x))), "x": batch.x * 2.0}


def formula(model, x):
    w = {name: array.astype(np.float64) for name, array in model.state().items()}
    h = np.tanh(x @ w["up.weight"].T + w["up.bias"])
    return h @ w["down.weight"].T + w["down.bias"]


def rows(count, seed=0):
    return np.random.default_rng(seed).standard_normal((count, 8)).astype(np.float32)


@pytest.fixture
def model():
    return Net().init(0)


@pytest.fixture
def opened(model):
    """Return a function that opens a predictor for so many rows, and closes it after the test."""
    predictors = []

    def make(count, **options):
        predictors.append(scores.predictor(model, {"x": rows(count)}, **options))
        return predictors[-1]

    yield make
    for predictor in predictors:
        predictor.close()


def test_it_computes_what_step_computes_with_the_newest_values(model, opened):
    predict = opened(3)
    for seed in range(4):
        batch = {"x": rows(3, seed)}
        outputs = predict(batch)
        np.testing.assert_array_equal(outputs["y"], scores.step(model, batch)["y"])
        np.testing.assert_allclose(outputs["y"], formula(model, batch["x"]), rtol=1e-5, atol=1e-6)
        model.load({name: array * 0.5 for name, array in model.state().items()})


def test_a_plan_of_step_stays_open_beside_it_and_is_another(model, opened):
    predict = opened(3)
    scores.step(model, {"x": rows(5)})
    predict({"x": rows(3)})
    scores.close(model)
    assert predict({"x": rows(3)})["y"].shape == (3, 4)


def test_rows_of_several_callers_make_one_batch(model, opened):
    predict = opened(4, max_wait_ms=WAIT_MS)
    with ThreadPoolExecutor(4) as pool:
        parts = [rows(1, seed) for seed in range(4)]
        answers = list(pool.map(lambda x: predict({"x": x}), parts))
    for x, outputs in zip(parts, answers, strict=True):
        np.testing.assert_array_equal(outputs["x"], x * 2)
        np.testing.assert_allclose(outputs["y"], formula(model, x), rtol=1e-5, atol=1e-6)


def test_who_is_alone_gets_its_rows_when_the_wait_is_over(model, opened):
    predict = opened(5, max_wait_ms=0)
    for count in (1, 5, 2):
        outputs = predict({"x": rows(count, count)})
        np.testing.assert_array_equal(outputs["x"], rows(count, count) * 2)


@pytest.mark.parametrize("max_wait_ms", [0, 1])
@pytest.mark.parametrize("size", [4, 7])
def test_whatever_comes_together_everybody_gets_the_own_rows(model, opened, size, max_wait_ms):
    predict = opened(size, max_wait_ms=max_wait_ms)

    def ask(seed):
        count = 1 + seed * 7 % 4
        x = rows(count, seed)
        return x, predict({"x": x})

    with ThreadPoolExecutor(6) as pool:
        for x, outputs in pool.map(ask, range(120)):
            np.testing.assert_array_equal(outputs["x"], x * 2)
            np.testing.assert_allclose(outputs["y"], formula(model, x), rtol=1e-5, atol=1e-6)


def test_an_answer_stays_when_others_come(model, opened):
    predict = opened(2, max_wait_ms=0)
    first = predict({"x": rows(2, 1)})["x"]
    predict({"x": rows(2, 2)})
    np.testing.assert_array_equal(first, rows(2, 1) * 2)


def test_a_caller_that_waits_hears_that_it_was_closed(opened):
    predict = opened(2, max_wait_ms=WAIT_MS)
    errors, is_waiting = [], threading.Event()

    def ask(seed):
        is_waiting.set()
        try:
            predict({"x": rows(1, seed)})
        except CompileError as error:
            errors.append(str(error))

    first = threading.Thread(target=ask, args=(0,))
    first.start()
    is_waiting.wait()
    predict.close()
    ask(1)  # fills the batch up
    first.join()
    assert len(errors) == 2
    assert all("it was closed; make another one" in text for text in errors)


def test_an_interrupt_is_of_one_caller_and_the_others_are_answered():
    class Interrupted:
        """What is stepped, interrupted the first time."""

        count = 0

        def load(self):
            pass

        def step(self, batches):
            self.count += 1
            if self.count == 1:
                raise KeyboardInterrupt
            return {"x": batches[0]["x"] * 2}

    spec = {"x": af.TensorType(af.DType.FLOAT32, (2, 8))}
    predict, answers, interrupted = Predictor(Interrupted(), spec, "here", 1), [], []

    def ask(seed):
        try:
            answers.append((seed, predict({"x": rows(1, seed)})["x"]))
        except KeyboardInterrupt:
            interrupted.append(seed)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(interrupted) == 1
    assert len(answers) == 4
    for seed, x in answers:
        np.testing.assert_array_equal(x, rows(1, seed) * 2)


def test_a_predictor_outlives_its_model_also_where_a_step_is_the_end_of_that():
    models = [Net().init(0)]
    expected, gone = formula(models[0], rows(3)), weakref.ref(models[0])

    def forgets(h):
        models.clear()
        gc.collect()
        return True

    @af.job(train=False)
    def checked(model, batch):
        af.debug.check(batch.x, forgets)
        return model.down(af.tanh(model.up(batch.x)))

    with checked.predictor(models[0], {"x": rows(3)}) as predict:
        for _ in range(3):
            y = predict({"x": rows(3)})["output"]
            np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
        assert gone() is None


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_predictor_that_is_dropped_leaves_nothing_with_the_model(model, is_closed):
    def live(kind):
        gc.collect()
        return sum([isinstance(thing, kind) for thing in gc.get_objects()])

    before = live(Runner), live(Job)
    predict = scores.predictor(model, {"x": rows(3)})
    predict({"x": rows(3)})
    if is_closed:
        predict.close()
    del predict
    assert (live(Runner), live(Job)) == before


@pytest.mark.host("a device has streams of its own")
@pytest.mark.parametrize("call", ["step", "close"])
def test_a_step_that_asks_for_its_own_plan_is_told_so(model, call):
    def asks(h):
        predict({"x": rows(3)}) if call == "step" else predict.close()

    @af.job(train=False)
    def asking(model, batch):
        af.debug.check(batch.x, asks)
        return model.up(batch.x)

    predict = asking.predictor(model, {"x": rows(3)})
    with predict, pytest.raises(af.CheckFailed, match="would wait for itself"):
        predict({"x": rows(3)})


def test_a_handler_of_a_signal_may_close_a_predictor_within_a_call(model):
    @af.job(train=False)
    def stopped(model, batch):
        af.debug.check(batch.x, lambda x: signal.raise_signal(signal.SIGTERM) or True)
        return model.up(batch.x)

    before = signal.signal(signal.SIGTERM, lambda number, frame: predict.close())
    try:
        predict = stopped.predictor(model, {"x": rows(3)})
        assert predict({"x": rows(3)})["output"].shape == (3, 16)
        with pytest.raises(CompileError, match="it was closed"):
            predict({"x": rows(3)})
    finally:
        signal.signal(signal.SIGTERM, before)


class Doubling:
    """What is stepped: it doubles, and refuses a batch with a row of the number 13."""

    def load(self):
        pass

    def step(self, batches):
        if (batches[0]["x"] == 13).any():
            raise ValueError("thirteen")
        return {"x": batches[0]["x"] * 2}


def doubling(size, max_wait_ms):
    spec = {"x": af.TensorType(af.DType.FLOAT32, (size, 8))}
    return Predictor(Doubling(), spec, "here", max_wait_ms)


def test_an_error_is_of_the_caller_whose_rows_raise_it():
    predict = doubling(4, WAIT_MS)

    def ask(number):
        try:
            return predict({"x": np.full((1, 8), number, np.float32)})["x"][0, 0]
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, (1, 13, 2, 3))) == [2, "thirteen", 4, 6]


def interrupt_at(count):
    """Raise KeyboardInterrupt in this thread at line `count` of the predictor's module, once.

    Not at a `with`, where no signal comes between a lock and the block that lets it go again.
    """
    left, file = [count], inspect.getsourcefile(Predictor)

    def watch(frame, event, argument):
        if frame.f_code.co_filename != file:
            return None
        line = linecache.getline(file, frame.f_lineno)
        if event == "line" and not line.lstrip().startswith("with "):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return watch

    sys.settrace(watch)


def test_an_interrupt_at_any_line_loses_no_request_of_another_caller():
    def ask(predict, count):
        before = sys.gettrace()
        interrupt_at(count)
        try:
            predict({"x": rows(1, 1)})
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    with ThreadPoolExecutor(2) as pool:
        for count in range(1, 80):
            predict = doubling(2, 5)  # so long one waits for the other
            is_interrupted = pool.submit(ask, predict, count)
            answer = pool.submit(predict, {"x": rows(1)})
            np.testing.assert_array_equal(answer.result(WAIT_MS / 1e3)["x"], rows(1) * 2)
            # Nothing is left behind, either: a full batch is computed at once.
            np.testing.assert_array_equal(predict({"x": rows(2)})["x"], rows(2) * 2)
            assert is_interrupted.result() or count > 15


def helpers_ns():
    """Return how long each thread that is not Python's has run, when all of them sleep again."""
    own = {str(thread.native_id) for thread in threading.enumerate()}
    folders = [Path("/proc/self/task") / task for task in {*os.listdir("/proc/self/task")} - own]
    while any([") R " in (folder / "stat").read_text() for folder in folders]):
        pass
    return {f.name: int((f / "schedstat").read_text().split()[0]) for f in folders}


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs /proc of Linux")
@pytest.mark.no_gpu("threads of the host")
@pytest.mark.usefixtures("native")
def test_a_predictor_of_one_thread_wakes_no_helper(monkeypatch):
    monkeypatch.setenv("ACTORFLOW_THREADS", "2")
    x = np.random.default_rng(0).standard_normal((512, 1024)).astype(np.float32)
    model = nn.Linear(1024, 1024).init(0)
    job = af.job(train=False)(lambda model, batch: {"y": af.exp(model(batch.x))})
    woken, answers = [], []
    for threads in (1, None):
        with job.predictor(model, {"x": x}, threads=threads) as predict:
            before = helpers_ns()
            answers += [predict({"x": x})["y"] for _ in range(5)]
            after = helpers_ns()
            woken.append([task for task in before if after[task] != before[task]])
    assert [len(tasks) > 0 for tasks in woken] == [False, True]
    np.testing.assert_allclose(answers[0], answers[-1], rtol=1e-5)


def test_a_plan_is_loaded_before_its_first_step(model):
    plan = scores.compile(model, {"x": af.TensorType(af.DType.FLOAT32, (3, 8))})
    runner = af.Runner(plan, values=model.state())
    assert runner.statistics() is None
    runner.load()
    assert [actor.firings for actor in runner.statistics().actors] == [0] * len(plan.actors)
    np.testing.assert_array_equal(runner.step({"x": rows(3)})["x"], rows(3) * 2)
    runner.close()


def test_a_limit_that_numpys_kernels_do_not_obey_is_said(opened, caplog, monkeypatch):
    monkeypatch.setenv("ACTORFLOW_NATIVE", "0")
    opened(3, threads=1)
    assert "threads=1 holds for native kernels, which are off here" in caplog.text


def test_what_no_predictor_takes_is_named(model, opened, monkeypatch):
    predict = opened(4, max_wait_ms=0)
    with raises(DataError):
        predict({"x": rows(5)})
    with raises(DataError):
        predict({"x": rows(0)})
    with raises(DataError):
        predict({"x": rows(2)[:, :7]})
    with raises(DataError):
        predict({"x": rows(2).astype(np.float64)})
    with raises(DataError):
        predict({})
    with raises(DataError):
        opened(4)({"x": rows(3)})
    monkeypatch.setenv("ACTORFLOW_THREADS", "2")
    for threads in (0, 3, 1.0, True, "1"):
        with raises(CompileError):
            opened(4, threads=threads)
    for wait in (-1, float("inf"), float("nan"), "2", True):
        with raises(CompileError):
            opened(4, max_wait_ms=wait)
    with raises(CompileError):
        af.job(lambda model, batch: model.up(batch.x).sum(), optimizer=af.optim.SGD(0.1)).predictor(
            model, {"x": rows(4)}
        )
    with raises(CompileError):
        af.job(lambda model, batch: model.up(batch.x).sum(), train=False).predictor(
            model, {"x": rows(4)}, max_wait_ms=1
        )
