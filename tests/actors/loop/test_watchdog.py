"""The watchdog on a clock of its own, and on real runs that really stand still."""

import ctypes
import dataclasses
import gc
import logging
import os
import threading
from functools import partial

import pytest

from actors.device.host import HostDevice
from actors.kernels.common.kernel import KernelNeeds, KernelPlan
from actors.kernels.library.launch import NativeLaunch
from actors.loop.dispatch import LoopOptions
from actors.loop.load import load
from actors.loop.loop import Loop
from actors.loop.watchdog import Watchdog, WatchdogOptions, diagnose
from actors.machine.errors import ActorFailed
from compiler.contract.plan_tables import ActorKind

pytestmark = pytest.mark.usefixtures("no_thread_is_left")

PATIENCE = 30
"""Seconds after which a test gives up on a thread; reached only when it fails."""


class Script:
    """A run that stands still but where the script says otherwise; time passes in `wait` only."""

    def __init__(self, situation, firings=(), end=1000.0):
        self.situation = situation
        self.firings = firings
        self.end = end
        self.now = 0.0
        self.said = []
        self.stalls = []
        self.num_looks = 0

    def watch(self, **options):
        watch = WatchdogOptions(on_stall=self.stalls.append, **options)
        watchdog = Watchdog(
            watch, progress=self.progress, examine=lambda: self.situation, wait=self.wait,
            report=self.said.append, clock=lambda: self.now,
        )  # fmt: skip
        watchdog.run()
        return self

    def progress(self):
        self.num_looks += 1
        return sum(at <= self.now for at in self.firings)

    def wait(self, seconds):
        assert seconds >= 1.0
        self.now += seconds
        return self.now >= self.end

    def seconds(self):
        return [stall.seconds for stall in self.stalls]


@pytest.fixture
def blocked(pipeline, bodies):
    """A situation whose source blocks."""
    gate = bodies.Gate()
    bound, _ = pipeline(gate)
    with Loop(bound) as loop:
        loop.admit(1)
        gate.wait_entered()
        return loop.examine()


def test_a_stall_is_reported_after_the_limit_and_again_whenever_it_has_doubled(blocked):
    script = Script(blocked).watch(seconds=60.0)
    assert script.seconds() == [60.0, 120.0, 240.0, 480.0, 960.0]
    assert all(stall.roots == ("data",) for stall in script.stalls)


def test_a_run_that_fires_is_looked_at_a_few_times_per_limit_and_never_reported(blocked):
    script = Script(blocked, firings=range(0, 1000, 30)).watch(seconds=60.0)
    assert script.stalls == script.said == []
    assert script.num_looks <= 1 + 1000 / 15


def test_the_end_of_a_stall_is_told_and_the_next_one_is_a_new_one(blocked):
    script = Script(blocked, firings=[100.0], end=200.0).watch(seconds=60.0)
    assert script.seconds() == [60.0, 60.0]
    assert [text.splitlines()[0].split(":")[0] for text in script.said] == [
        "no firing began or ended for 60 s",
        "the run continues after about 105 s",
        "no firing began or ended for 60 s",
    ]


def test_a_short_limit_is_not_looked_at_more_than_once_a_second(blocked):
    script = Script(blocked, firings=range(100), end=100.0).watch(seconds=0.5)
    assert script.num_looks <= 101


def test_a_limit_of_ages_is_no_longer_a_wait_than_a_thread_can_do(blocked):
    script = Script(blocked, end=4000.0).watch(seconds=1e30)
    assert (script.num_looks, script.stalls) == (2, [])


def test_a_run_that_waits_for_more_steps_is_not_stalled(pipeline):
    bound, _ = pipeline()
    loop = Loop(bound)
    assert Script(loop.examine()).watch(seconds=1.0).stalls == []
    loop.close()


def test_the_messages_are_told_with_the_first_report_only(blocked):
    seen = dataclasses.replace(blocked, messages=("<first>", "<last>"))
    said = Script(seen).watch(seconds=60.0).said
    assert said[0].endswith("\nthe last 2 messages:\n<first>\n<last>")
    assert "<first>" not in "".join(said[1:])


def test_a_folder_gets_every_report_and_the_log_is_spared_the_messages(blocked, tmp_path):
    folder = tmp_path / "runs" / "a"
    seen = dataclasses.replace(blocked, messages=("<first>", "<last>"))
    script = Script(seen, end=130.0).watch(seconds=60.0, folder=folder)
    text = (folder / "stall.txt").read_text()
    assert text.count("no firing began or ended for") == 2
    assert "the last 2 messages:\n<first>\n<last>\n" in text
    assert script.said[0].endswith(f"\nthe last messages are in {folder / 'stall.txt'}")


@pytest.mark.parametrize("kind", ["pipe", "link", "link to nothing", "second name", "device"])
def test_a_stall_is_written_to_no_file_but_a_regular_one_of_ours(blocked, tmp_path, kind):
    victim, file = tmp_path / "victim", tmp_path / "run" / "stall.txt"
    victim.write_text("precious")
    file.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "second name":
        os.link(victim, file)
    else:
        targets = {"link": victim, "link to nothing": tmp_path / "new", "device": "/dev/null"}
        file.symlink_to(targets[kind])
    script = Script(dataclasses.replace(blocked, messages=("one",)), end=61.0)
    (said,) = script.watch(seconds=60.0, folder=file.parent).said
    assert "stall.txt cannot be written: " in said
    assert said.endswith("the last 1 messages:\none")
    assert victim.read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["run", "victim"]


def test_a_folder_that_cannot_be_written_leaves_the_messages_to_the_log(blocked, tmp_path):
    (tmp_path / "file").write_text("")
    script = Script(dataclasses.replace(blocked, messages=("one",)), end=61.0)
    (said,) = script.watch(seconds=60.0, folder=tmp_path / "file").said
    assert "stall.txt cannot be written: " in said
    assert said.endswith("the last 1 messages:\none")


def test_a_listener_that_raises_is_reported_and_nothing_else_happens(blocked, bodies):
    script = Script(blocked, end=130.0)
    script.stalls = type("Refuse", (), {"append": bodies.fail_at(0, ValueError("no"))})
    script.watch(seconds=60.0)
    assert script.said[1] == "on_stall raised ValueError('no'); the run continues"
    assert script.said[2].startswith("no firing began or ended for 120 s")


# -- real runs -------------------------------------------------------------------------------------


def settle(loop):
    """Wait until the dispatcher has taken every message sent so far."""
    taken = threading.Event()
    loop.call_soon_threadsafe(taken.set)
    assert taken.wait(PATIENCE)


def stall_of(loop):
    stall = diagnose(loop.examine(), 61.0)
    return stall, {report.name: report.doing for report in stall.actors}


def test_a_source_that_blocks_in_user_code_is_named_with_the_line_where_it_blocks(pipeline, bodies):
    gate = bodies.Gate()
    with Loop(pipeline(gate)[0]) as loop:
        loop.admit(5)
        gate.wait_entered()
        settle(loop)
        stall, doing = stall_of(loop)
    assert stall.roots == ("data",)
    assert stall.reason.startswith("'data' has been in its source port (train.py:1) for ")
    assert "conftest.py:" in stall.reason.partition(", now at ")[2]
    assert stall.reason.endswith(" in __call__")
    assert doing["step"] == "waits for input 'batch' from 'data'"
    assert doing["log"] == "waits for input 'loss' from 'step'"


def test_a_sink_whose_callback_blocks_is_named_and_the_others_wait_for_its_slots(pipeline, bodies):
    gate = bodies.Gate()
    with Loop(pipeline(sink=gate)[0]) as loop:
        loop.admit(50)
        gate.wait_entered()
        while (stall := stall_of(loop))[0].roots != ("log",) or "free slot" not in stall[1]["data"]:
            settle(loop)
    assert stall[0].reason.startswith("'log' has been in its sink port (train.py:2) for ")
    assert stall[1]["step"] == "waits for a free slot of register 'loss' from 'log'"
    assert stall[1]["data"] == "waits for a free slot of register 'batch' from 'step'"


@pytest.mark.parametrize("is_thread", [False, True])
def test_a_kernel_that_hangs_is_named_with_its_launch_and_the_users_line(
    plan_maker, fake_port, fake_kernel, bodies, is_thread
):
    make, gate = plan_maker(), bodies.Gate()
    batch, mid = make.edge("batch", 2), make.edge("mid", 2)
    make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)])
    launches = [make.launch("quick"), make.launch("hangs"), make.launch("quick")]
    make.actor(
        "step", ActorKind.COMPUTE, inputs=[(batch, 1)], outputs=[(mid, 1)], launches=launches,
        is_thread=is_thread,
    )  # fmt: skip
    make.actor(
        "after", ActorKind.COMPUTE, inputs=[(mid, 1)], launches=[make.launch("quick")],
        is_thread=is_thread,
    )  # fmt: skip
    make.actors[2] = dataclasses.replace(make.actors[2], stream=make.actors[1].stream)
    kernels = {"quick": fake_kernel(), "hangs": fake_kernel(lambda i, o: gate(None))}
    bound = load(make.plan(), {"data": fake_port(bodies.Counting())}, (HostDevice(kernels),))
    with Loop(bound) as loop:
        loop.admit(50)
        gate.open()
        gate.wait_entered()
        gate.wait_entered()
        if is_thread:
            settle(loop)
        stall, doing = stall_of(loop)
        gate.permits.put("closed")
    assert stall.roots == ("step",)
    assert stall.reason.startswith(
        "'step' has been in launch 2 of 3, op 'op_hangs' in 'scope.hangs' (train.py:4) for "
    )
    assert doing["after"].startswith(
        ("waits for its stream, which 'step' occupies", "waits for input 'mid' from 'step'")
    )


class CallsBack:
    """A native kernel: C calls a function of Python's."""

    def __init__(self, body):
        self.call = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(lambda _: body() or 0)

    def plan(self, attrs, inputs, outputs):
        return KernelPlan(KernelNeeds(), self._bind)

    def _bind(self, inputs, outputs, workspace):
        return NativeLaunch(ctypes.cast(self.call, ctypes.c_void_p).value, 0, (self.call,))


def test_a_launch_that_hangs_in_a_joined_native_chain_is_named_with_op_and_line(
    native, plan_maker, fake_port, bodies
):
    make, gate = plan_maker(), bodies.Gate()
    batch = make.edge("batch", 2)
    make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)])
    launches = [make.launch(name) for name in ("quick", "quick", "hangs", "quick")]
    make.actor("step", ActorKind.COMPUTE, inputs=[(batch, 1)], launches=launches)
    kernels = {"quick": CallsBack(lambda: 0), "hangs": CallsBack(lambda: gate(None))}
    bound = load(make.plan(), {"data": fake_port(bodies.Counting())}, (HostDevice(kernels),))
    assert [len(chain) for chain in bound.chains[1]] == [1, 1]
    with Loop(bound) as loop:
        loop.admit(50)
        gate.open()
        gate.wait_entered()
        gate.wait_entered()
        stall, _ = stall_of(loop)
        gate.permits.put("closed")
    assert stall.reason.startswith(
        "'step' has been in launch 3 of 4, op 'op_hangs' in 'scope.hangs' (train.py:4) for "
    )


def test_a_chain_that_hangs_and_does_not_tell_where_is_named_with_all_that_it_can_be(
    plan_maker, fake_port, fake_kernel, bodies
):
    make, gate = plan_maker(), bodies.Gate()
    batch = make.edge("batch", 2)
    make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)])
    launches = [make.launch(name) for name in ("first", "second")]
    make.actor("step", ActorKind.COMPUTE, inputs=[(batch, 1)], launches=launches)
    kernels = {"first": fake_kernel(), "second": fake_kernel()}
    bound = load(make.plan(), {"data": fake_port(bodies.Counting())}, (HostDevice(kernels),))
    bound.chains = (bound.chains[0], ((lambda: gate(None),),))
    with Loop(bound) as loop:
        loop.admit(50)
        gate.wait_entered()
        stall, _ = stall_of(loop)
        gate.permits.put("closed")
    assert stall.reason.startswith(
        "'step' has been in one of its 2 launches (ops op_first, op_second)"
        " (train.py:2, train.py:3) for "
    )


def test_a_deadlock_is_seen_before_the_end_is_asked_for(deadlocked):
    with Loop(deadlocked) as loop:
        loop.admit(3)
        while (stall := diagnose(loop.examine(), 61.0)) is None or not stall.is_deadlock:
            settle(loop)
    assert stall.roots == ("a", "c", "b")
    assert "more slots of 'direct' would let it continue" in stall.reason


def test_the_last_thousand_messages_of_a_long_run_are_told(pipeline, bodies):
    gate = bodies.Gate()
    gate.open(2000)
    with Loop(pipeline(gate)[0]) as loop:
        loop.admit(3000)
        for _ in range(2001):
            gate.wait_entered()
        messages = loop.examine().messages
    assert len(messages) == 1000
    assert any(row == "READY 'batch' data -> step" for row in messages)


@pytest.mark.parametrize("actor", [1, 2])
def test_a_look_at_a_stalled_run_does_not_keep_its_arena(pipeline, arenas, bodies, actor):
    gate = bodies.Gate()
    bound, ports = pipeline()
    arenas.refuse_at(bound, [actor], ports["log"].bound[0][0]["x"], before=[partial(gate, None)])
    arena = arenas.of(ports)
    with Loop(bound) as loop:
        loop.admit(9)
        gate.wait_entered()
        assert stall_of(loop)[0].roots == (("step", "log")[actor - 1],)
        gate.open()
        with pytest.raises(ActorFailed):
            loop.wait(PATIENCE)
    bound.release()
    gc.collect()
    assert arena() is None


def test_a_watched_run_reports_through_its_thread_and_may_be_closed_by_the_listener(
    pipeline, bodies, monkeypatch, caplog
):
    monkeypatch.setattr("actors.loop.watchdog._LEAST_INTERVAL_S", 1e-3)
    gate, closed = bodies.Gate(), threading.Event()

    def close(stall):
        loop.close()
        closed.set()

    loop = Loop(pipeline(gate)[0], LoopOptions(watch=WatchdogOptions(1e-6, on_stall=close)))
    loop.start()
    loop.admit(1)
    assert closed.wait(PATIENCE)
    assert loop.wait(PATIENCE) is False
    loop.threads()[-1].join(PATIENCE)
    assert caplog.records[0].levelno == logging.WARNING
    assert "'data' has been in its source port" in caplog.records[0].message


def test_a_run_is_watched_only_where_that_was_asked_for_and_the_thread_ends_with_it(
    pipeline, new_threads
):
    def names():
        return [thread.name for thread in new_threads()]

    for watch in (None, WatchdogOptions(0)):
        with Loop(pipeline()[0], LoopOptions(watch=watch)):
            assert "actorflow-watchdog" not in names()
    with Loop(pipeline()[0], LoopOptions(watch=WatchdogOptions())) as loop:
        assert "actorflow-watchdog" in names()
        loop.admit(3)
        loop.end()
        assert loop.wait(PATIENCE)
