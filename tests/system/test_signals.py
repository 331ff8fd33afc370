"""A run is asked to end by a signal: whatever its source does, the last finished step is saved."""

import fcntl
import os
import pty
import re
import signal
import termios

import pytest
from launching import insist

from actorflow.checkpoint.manager import CheckpointManager
from actorflow.run.stopping import StopSignals

TRAINING = """
    import signal, sys, threading
    import numpy as np
    import actorflow as af
    from actorflow import nn

    class Blocking:
        '''Gives some batches, and then waits for ever in `__next__`.'''

        def __init__(self, batches):
            self.left = batches
            self.given = 0

        def spec(self):
            return {"x": af.TensorType(af.DType.FLOAT32, (4, 2))}

        def __next__(self):
            if self.given == self.left:
                print("blocked", flush=True)
                threading.Event().wait()
            self.given += 1
            return {"x": np.full((4, 2), self.given, np.float32)}

        def state(self):
            return {"given": self.given}

        def restore(self, state):
            self.given = state["given"]

        def fingerprint(self):
            return "blocking"

    def loss_of(model, batch):
        return model(batch.x).mean()

    train = af.job(loss_of, optimizer=af.optim.SGD(1e-3))
    model = nn.Linear(2, 2)
"""

BLOCKED = (
    TRAINING
    + """
    before = [signal.getsignal(s) for s in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)]
    try:
        train.fit(model, Blocking(3), steps=9, checkpoint="run", every=100)
    except af.Stopped as stopped:
        after = [signal.getsignal(s) for s in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)]
        print("stopped", stopped.step, after == before, flush=True)
        raise
    """
)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_a_run_whose_source_blocks_with_its_last_step_saved(
    start_python, tmp_path, name
):
    signum = signal.Signals[name]
    program = start_python(BLOCKED)
    program.until("blocked")
    program.process.send_signal(signum)
    line = program.until(f"{name}: stopping after the step that is under way")
    at = r"; waiting for the data source \(.*program0\.py:\d+ in __next__\), for a data source at"
    assert re.search(at, line), "the user's own line is told, not the library's"
    assert f"stopped by {name} after step 3; it is checkpointed" in program.until("stopped by")
    assert program.until("stopped ") == "stopped 3 True"
    code, _, err = program.finish()
    assert code == 128 + signum, err
    assert "its thread is abandoned" in err
    assert CheckpointManager(tmp_path / "run").latest().manifest.step == 3


def test_an_interrupt_says_that_it_waits_for_on_step(start_python):
    program = start_python(
        TRAINING
        + """
    def on_step(step, metrics):
        if step == 2:
            print("in on_step", flush=True)
            sys.stdin.readline()

    train.fit(model, Blocking(100), steps=50, on_step=on_step)
    """
    )
    program.until("in on_step")
    program.process.send_signal(signal.SIGINT)
    assert re.search(r"waiting for .*on_step \(.*program0\.py:\d+", program.until("stopping after"))
    program.process.stdin.write("go on\n")
    program.process.stdin.flush()
    program.until("stopped by SIGINT")
    assert program.finish()[0] == 130


def test_a_second_interrupt_leaves_at_once_and_says_so_before(start_python):
    program = start_python(BLOCKED)
    program.until("blocked")
    program.process.send_signal(signal.SIGINT)
    assert "SIGINT again quits at once, 1 s later or more" in program.until("stopping after")
    insist(program.process, signal.SIGINT)
    assert program.finish()[0] == 130


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_copies_of_a_signal_are_one_wish_and_the_last_step_is_saved(start_python, tmp_path, name):
    signum = signal.Signals[name]
    program = start_python(BLOCKED)
    program.until("blocked")
    for _ in range(3):  # as `timeout` does
        program.process.send_signal(signum)
        program.process.send_signal(signal.SIGCONT)
    assert f"stopped by {name} after step 3; it is checkpointed" in program.until("stopped by")
    assert program.finish()[0] == 128 + signum
    assert CheckpointManager(tmp_path / "run").latest().manifest.step == 3


@pytest.mark.parametrize(
    ("signals", "reported", "left"),
    [
        ([(15, 0.0), (15, 0.001), (15, 0.999)], [15], []),
        ([(15, 0.0), (15, 1.0)], [15], [143]),
        ([(2, 0.0), (15, 0.5), (2, 0.9), (15, 1.4)], [2, 15], []),
        ([(2, 0.0), (15, 0.5), (2, 1.2), (15, 1.4)], [2, 15], [130]),
        ([(1, 0.0), (1, 0.5), (1, 9.0)], [1], []),
    ],
)
def test_the_same_signal_counts_again_when_some_time_has_passed(
    monkeypatch, signals, reported, left
):
    exits, told, now_s = [], [], [0.0]
    monkeypatch.setattr("os._exit", exits.append)
    with StopSignals(told.append, clock=lambda: now_s[0]) as taken:
        for number, now_s[0] in signals:
            taken._handle(number, None)
    assert (told, exits) == (reported, left)


def test_a_terminal_that_closes_twice_still_lets_the_step_be_saved(start_python, tmp_path):
    program = start_python(BLOCKED)
    program.until("blocked")
    program.process.send_signal(signal.SIGHUP)
    program.until("SIGHUP: stopping after")
    program.process.send_signal(signal.SIGHUP)
    assert program.until("stopped ").startswith("stopped by SIGHUP after step 3")
    assert program.finish()[0] == 129
    assert CheckpointManager(tmp_path / "run").latest().manifest.step == 3


def test_a_signal_that_another_thread_receives_still_ends_the_run(start_python):
    program = start_python(
        TRAINING.replace("threading.Event().wait()", "self.block()")
        + """
    def block(self):
        signal.pthread_kill(threading.get_ident(), signal.SIGHUP)  # wakes nobody but this thread
        threading.Event().wait()

    Blocking.block = block
    train.fit(model, Blocking(3), steps=9)
    """
    )
    program.until("SIGHUP: stopping after")
    assert program.finish()[0] == 129


def test_a_signal_that_was_ignored_stays_ignored(start_python):
    program = start_python(
        "    import signal\n    signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + BLOCKED
    )
    program.until("blocked")
    program.process.send_signal(signal.SIGHUP)
    program.process.send_signal(signal.SIGTERM)
    assert "SIGTERM" in program.until("stopping after")
    assert program.finish()[0] == 143


def test_an_evaluation_whose_source_blocks_does_not_keep_a_run_from_ending(start_python, tmp_path):
    program = start_python(
        TRAINING
        + """
    evaluate = af.job(loss_of, train=False)
    evaluation = af.Evaluation(evaluate, Blocking(1), every=3, batches=2)
    told = []
    try:
        train.fit(model, Blocking(100), steps=9, checkpoint="run", every=100,
                  evaluation=evaluation, on_step=lambda step, metrics: told.append(step))
    finally:
        print("told", told, flush=True)
    """
    )
    program.until("blocked")
    program.process.send_signal(signal.SIGTERM)
    told = program.until("told")
    code, _, err = program.finish()
    assert code == 143, err
    last = CheckpointManager(tmp_path / "run").latest().manifest.step
    assert last >= 3, "batches that were there already are trained on"
    assert told == f"told {list(range(1, last + 1))}"


def test_a_step_of_several_batches_that_a_blocked_source_cut_is_not_saved(start_python, tmp_path):
    program = start_python(
        TRAINING
        + """
    train = af.job(loss_of, optimizer=af.optim.SGD(1e-3), accumulate=4)
    train.fit(model, Blocking(10), steps=9, checkpoint="run", every=100)
    """
    )
    program.until("blocked")
    program.process.send_signal(signal.SIGTERM)
    assert program.until("stopped by").startswith("stopped by SIGTERM after step 2")
    assert program.finish()[0] == 143
    loaded = CheckpointManager(tmp_path / "run").latest()
    assert (loaded.manifest.step, loaded.manifest.data_state) == (2, {"given": 8})


def test_a_source_that_a_signal_broke_too_does_not_hide_that_the_run_was_stopped(
    start_python, tmp_path
):
    program = start_python(
        TRAINING
        + """
    class Broken(Blocking):
        def __next__(self):
            if self.given == self.left:
                print("blocked", flush=True)
                sys.stdin.readline()
                raise BrokenPipeError("a worker was interrupted")
            return super().__next__()

    train.fit(model, Broken(3), steps=9, checkpoint="run", every=100)
    """
    )
    program.until("blocked")
    program.process.send_signal(signal.SIGINT)
    program.until("stopping after")
    program.process.stdin.write("go on\n")
    program.process.stdin.flush()
    program.until("stopped by SIGINT after step 3")
    code, _, err = program.finish()
    assert code == 130
    assert "the run was stopping when the data source raised BrokenPipeError" in err
    assert CheckpointManager(tmp_path / "run").latest().manifest.step == 3


def test_a_stream_is_left_although_its_source_blocks(start_python):
    program = start_python(
        TRAINING
        + """
    for number, metrics in enumerate(train.stream(model, Blocking(3)), 1):
        if number == 3:
            break
    print("left", model.weight.data is not None, flush=True)
    """
    )
    assert program.until("left") == "left True"
    assert program.finish()[0] == 0


def test_a_fit_outside_of_the_main_thread_leaves_the_handlers_alone(start_python):
    program = start_python(
        TRAINING
        + """
    before = signal.getsignal(signal.SIGTERM)
    seen = []
    def fit():
        train.fit(model, Blocking(9), steps=3, progress=False,
                  on_step=lambda *_: seen.append(signal.getsignal(signal.SIGTERM)))
    thread = threading.Thread(target=fit)
    thread.start()
    thread.join()
    print("same", seen == [before] * 3, flush=True)
    """
    )
    assert program.until("same") == "same True"


@pytest.mark.parametrize("raising", [False, True])
def test_the_handlers_come_back_in_every_ending(raising):
    names = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(n) for n in names]
    try:
        with StopSignals(lambda signum: None) as signals:
            assert [signal.getsignal(n) for n in names] == [signals._handle] * 3
            if raising:
                raise ValueError
    except ValueError:
        pass
    assert [signal.getsignal(n) for n in names] == before


def test_the_handlers_that_a_forked_child_has_are_those_from_before(child_says):
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals(lambda signum: None):
        assert child_says(lambda: signal.getsignal(signal.SIGTERM) == before) == "True"
        with StopSignals(lambda signum: None):
            assert child_says(lambda: signal.getsignal(signal.SIGTERM) == before) == "True"


def test_a_signal_after_the_last_step_still_ends_the_process(start_python):
    program = start_python(
        TRAINING
        + """
    import os
    def last(step, metrics):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
    train.fit(model, Blocking(9), steps=3, progress=False, on_step=last)
    print("not reached", flush=True)
    """
    )
    code, out, _ = program.finish()
    assert (code, out) == (143, "")


def test_a_terminal_window_that_is_closed_lets_the_last_step_be_saved(start_python, tmp_path):
    ours, its = pty.openpty()
    fit = '    train.fit(model, Blocking(3), steps=9, checkpoint="run", every=100)'
    program = start_python(
        TRAINING + fit, stdin=its, stdout=its, stderr=its, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(its)
    seen = b""
    # Up to the end of the line, where progress may come in between: the source's print is over.
    while b"\n" not in seen.partition(b"blocked")[2]:
        seen += os.read(ours, 4096)
    os.close(ours)  # SIGHUP, and every write is an EIO from now on
    assert program.process.wait(60) == 129
    assert CheckpointManager(tmp_path / "run").latest().manifest.step == 3
