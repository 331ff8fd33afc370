"""`job.step` of a plan that one thread runs: on the caller's, which keeps what it had."""

import signal
import threading

import numpy as np
import pytest

import actorflow as af
from actorflow import nn

pytestmark = [
    pytest.mark.host("a device has streams of its own"),
    pytest.mark.one_device("several have streams"),
]


class Net(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def __call__(self, x):
        return self.down(af.relu(self.up(x)))


def loss(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)


def batches(count=6):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, 12, 8)).astype(np.float32)
    return [{"x": one, "y": rng.integers(0, 4, 12)} for one in x]


@pytest.fixture
def train():
    return af.job(loss, optimizer=af.optim.AdamW(1e-2))


def test_a_step_starts_no_thread_and_computes_what_a_stream_computes(train, new_threads):
    model, other = Net(), Net()
    other.load(model.init(0).state())
    losses = [train.step(model, batch)["loss"] for batch in batches()]
    assert not new_threads()
    table = {name: np.concatenate([b[name] for b in batches()]) for name in ("x", "y")}
    data = af.data.ArraySource(table, batch=12, shuffle=False)
    assert losses == [outputs["loss"] for outputs in train.stream(other, data, steps=6)]
    for name, array in other.state().items():
        np.testing.assert_array_equal(model.state()[name], array)


def test_the_callers_thread_has_its_own_settings_of_numpy_again(train):
    model, large = Net(), {"x": np.full((12, 8), 1e38, np.float32), "y": np.zeros(12, int)}
    predict = af.job(lambda model, batch: af.exp(model(batch.x) * batch.x.sum()), train=False)
    with np.errstate(all="raise"):
        np.setbufsize(4096)
        predict.step(model, large)  # overflows, which a kernel may
        assert {*np.geterr().values()} == {"raise"}
        assert np.getbufsize() == 4096
        with pytest.raises(FloatingPointError):
            np.float32(1e38) * np.float32(1e38)
    train.step(model, batches()[0])
    assert "raise" not in np.geterr().values()


def test_an_interrupt_comes_when_the_step_is_whole(train):
    model, other, heard = Net(), Net(), []
    other.load(model.init(0).state())

    def interrupting(model, batch):
        h = model.up(batch.x)
        af.debug.check(h, lambda h: signal.raise_signal(signal.SIGINT) or True)
        return af.cross_entropy(model.down(af.relu(h)), batch.y)

    torn = af.job(interrupting, optimizer=af.optim.AdamW(1e-2))
    before = signal.getsignal(signal.SIGINT)
    first, second, *_ = batches()
    with pytest.raises(KeyboardInterrupt):
        torn.step(model, first)
    assert signal.getsignal(signal.SIGINT) is before
    train.step(other, first)
    for name, array in other.state().items():
        np.testing.assert_array_equal(model.state()[name], array)
    # A handler that raises nothing is called once for each step.
    signal.signal(signal.SIGINT, lambda signum, frame: heard.append(signum))
    try:
        assert torn.step(model, second) == train.step(other, second)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_handler_of_a_signal_may_read_the_model_and_leave_when_the_step_is_whole(train, which):
    model, other, read = Net(), Net(), []
    other.load(model.init(0).state())

    def interrupting(model, batch):
        h = model.up(batch.x)
        af.debug.check(h, lambda h: signal.raise_signal(which) or True)
        return af.cross_entropy(model.down(af.relu(h)), batch.y)

    def leave(number, frame):
        read.append(model.state())
        raise SystemExit(number)

    torn = af.job(interrupting, optimizer=af.optim.AdamW(1e-2))
    before = signal.signal(which, leave)
    try:
        for count, batch in enumerate(batches(2), 1):
            with pytest.raises(SystemExit):
                torn.step(model, batch)
            assert signal.getsignal(which) is leave
            train.step(other, batch)
            assert len(read) == count
            for name, array in other.state().items():
                np.testing.assert_array_equal(read[-1][name], array)
                np.testing.assert_array_equal(model.state()[name], array)
    finally:
        signal.signal(which, before)


def test_of_two_signals_in_a_step_both_are_handled(train):
    heard, model = [], Net()

    def interrupting(model, batch):
        h = model.up(batch.x)
        af.debug.check(h, lambda h: not [signal.raise_signal(number) for number in numbers * 2][9:])
        return {"y": h}

    def raises(number, frame):
        heard.append(number)
        raise ValueError(number)

    numbers = [signal.SIGTERM, signal.SIGUSR1]
    before = [signal.signal(number, raises) for number in numbers]
    try:
        with pytest.raises(ValueError):
            af.job(interrupting, train=False).step(model, batches(1)[0])
        assert sorted(heard) == sorted(numbers)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_threads_step_one_model_in_turn_and_read_it_meanwhile(train, new_threads):
    model, seen = Net(), []
    train.step(model, batches()[0])

    def step():
        for batch in batches(20):
            seen.append(train.step(model, batch)["loss"])

    threads = [threading.Thread(target=step) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any([thread.is_alive() for thread in threads]):
        assert all([np.isfinite(array).all() for array in model.state().values()])
    for thread in threads:
        thread.join()
    assert len(seen) == 60
    train.close(model)
    assert not new_threads()
