"""A signal at any moment of a run: it is stopped cleanly, and goes on bit-exact."""

import signal
import threading

import pytest

import actorflow as af
from actorflow.checkpoint.manager import CheckpointManager
from actorflow.run.report import Reporter
from actorflow.run.status import Listener, StatusWriter
from actorflow.run.training_run import Run
from actors.loop.loop import Loop

STEPS = 12
MOMENTS = [
    (CheckpointManager, "open"), (CheckpointManager, "latest"), (CheckpointManager, "save"),
    (CheckpointManager, "close"), (Run, "__init__"), (Run, "start"), (Run, "wait"), (Run, "close"),
    (Loop, "start"), (Loop, "close"), (Listener, "start"), (Listener, "__call__"),
    (Reporter, "start"), (Reporter, "notice"), (Reporter, "finish"), (StatusWriter, "finish"),
]  # fmt: skip


@pytest.fixture
def not_handled():
    """Fail where a signal comes while no run handles it, in place of ending the tests."""
    raised = []
    before = {
        s: signal.signal(s, lambda signum, frame: raised.append(signum))
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    yield raised
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), MOMENTS, ids=[f"{o.__name__}.{n}" for o, n in MOMENTS])
def test_a_signal_at_any_moment_stops_a_run_that_goes_on_bit_exact(
    mlp,
    classification,
    classify,
    tmp_path,
    monkeypatch,
    not_handled,
    owner,
    name,
    is_after,
    new_threads,
):
    def fit(directory):
        return classify().fit(
            mlp(), classification(), steps=STEPS, checkpoint=tmp_path / directory, every=4
        )

    call, is_sent = getattr(owner, name), []

    def send():
        if not is_sent:
            is_sent.append(name)
            # To the thread that handles it, which has it at once: to the process, any takes it.
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)

    def sending(*arguments, **options):
        if not is_after:
            send()
        result = call(*arguments, **options)
        if is_after:
            send()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, sending)
        with pytest.raises(af.Stopped) as caught:
            fit("run")
    assert is_sent
    assert not not_handled
    assert caught.value.code == 143
    assert not new_threads()
    saved = CheckpointManager(tmp_path / "run").latest()
    assert caught.value.step == (0 if saved is None else saved.manifest.step)
    result, whole = fit("run"), fit("whole")
    assert result.first_step == caught.value.step
    for variable, array in whole.variables.items():
        assert (array == result.variables[variable]).all()
