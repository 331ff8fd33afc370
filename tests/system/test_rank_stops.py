"""A job of ranks is asked to end: the last step that all have finished is saved, soon."""

import math
import os
import signal

import pytest
from launching import SHAPES, STAGED, end_of, launcher

from actorflow.checkpoint.manager import CheckpointManager

pytestmark = [
    pytest.mark.usefixtures("native_toolchain"),
    pytest.mark.no_gpu("ranks meet in memory of the host"),
]

SCRIPT = f"""
import os, sys
{STAGED}
{SHAPES}
def tell(step, metrics):
    if step == 5:
        with open(os.environ["TELLS"], "w") as file:
            print(os.getpid(), file=file)

train = af.job(loss, optimizer=af.optim.SGD(0.1), mesh=af.Mesh(**eval(sys.argv[1])))
data = af.data.ArraySource(arrays, batch=12, seed=3)
train.fit(Net(), Shapes(data) if sys.argv[2:] else data, steps=1_000_000, checkpoint="run",
          every=1_000_000, progress=False, on_step=tell)
"""


@pytest.fixture
def begun(tmp_path):
    """Return a function that starts a script and returns it with the processes that told theirs."""
    os.mkfifo(tmp_path / "tells")
    with launcher(tmp_path) as start, open(os.open(tmp_path / "tells", os.O_RDWR)) as tells:

        def begin(axes, *words):
            process = start(SCRIPT, f"dict({axes})", *words, ACTORFLOW_RANK_SECONDS="90")
            return process, [int(tells.readline()) for _ in range(2)]

        yield begin


@pytest.mark.thinned(5)
@pytest.mark.parametrize("axes", ["data=2", "stage=2"])
@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_to_every_process_saves_the_last_step(begun, tmp_path, name, is_last, axes):
    number = signal.Signals[name]
    process, ranks = begun(axes)
    for pid in [*ranks, process.pid] if is_last else [process.pid, *ranks]:
        os.kill(pid, number)
    code, _, err = end_of(process)
    assert code == 128 + number, err
    assert CheckpointManager(tmp_path / "run").latest().manifest.step >= 5


@pytest.mark.thinned(4)
@pytest.mark.parametrize("axes", ["data=2", "stage=2"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_while_plans_take_turns_saves_the_last_step(begun, tmp_path, name, axes):
    process, ranks = begun(axes, "shapes")
    for pid in [process.pid, *ranks]:
        os.kill(pid, signal.Signals[name])
    code, _, err = end_of(process)
    assert code == 128 + signal.Signals[name], err
    manifest = CheckpointManager(tmp_path / "run").latest().manifest
    assert manifest.step == manifest.data_state["count"] >= 5


# While one rank blocks, and the others have begun a step that they cannot finish without it.

BLOCKED = f"""
import os, sys, time
{STAGED}
{SHAPES}
from compiler.storage import order
rank, case = int(os.environ["RANK"]), eval(sys.argv[1])

def block(here, step):
    if case["blocks"].get(rank) == (here, step):
        with open(os.environ["TELLS"], "w") as file:
            print(os.getpid(), file=file)
        while here != "told":
            time.sleep(1000)

class Data(af.data.ArraySource):
    batches = 0

    def next_rows_into(self, *rows, **more):
        self.batches += 1
        block("source", self.batches)
        return super().next_rows_into(*rows, **more)

class Normed(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def __call__(self, x):
        return super().__call__(self.norm(x))

def on_step(step, metrics):
    block("on_step", step)
    block("told", step)

if case.get("writes_at_once"):
    order.peer_edges = lambda *args: []

@af.job(optimizer=af.optim.AdamW(0.1), mesh=af.Mesh(**case["mesh"]), **case.get("job", {{}}))
def train(model, batch):
    # What is dropped in a step follows from its number.
    return af.cross_entropy(af.dropout(model(batch.x), 0.1), batch.y)

model, data = globals()[case.get("net", "Net")](), Data(arrays, batch=12, seed=3)
train.fit(model, Shapes(data) if case.get("shapes") else data, steps=case.get("steps", 1_000_000),
          on_step=on_step, checkpoint=case["folder"], every=case.get("every", 1_000_000),
          progress=False)
"""


def blocked(tmp_path, case, *, stops=False, sends=signal.SIGTERM):
    """Run a case until as many ranks block as it says, and stop it; return how it ended."""
    os.mkfifo(tmp_path / "tells")
    count = math.prod(case["mesh"].values())
    with launcher(tmp_path) as start, open(os.open(tmp_path / "tells", os.O_RDWR)) as tells:
        environ = {"ACTORFLOW_RANK_SECONDS": "80"}
        process = start(BLOCKED, repr(case | {"folder": "run"}), n=count, **environ)
        pids = [int(tells.readline()) for _ in case["blocks"]]
        for pid in pids if stops else ():
            os.kill(pid, signal.SIGSTOP)
        process.send_signal(sends)
        return end_of(process)


def undisturbed(tmp_path, case, step):
    """Return the checkpoint of a run of the same case that nobody stops, after some steps."""
    count = math.prod(case["mesh"].values())
    given = case | {"blocks": {}, "steps": step, "folder": "whole"}
    with launcher(tmp_path) as start:
        code, _, err = end_of(start(BLOCKED, repr(given), n=count))
        assert code == 0, err
    return CheckpointManager(tmp_path / "whole").latest()


def assert_equal(saved, expected):
    assert saved.manifest.step == expected.manifest.step
    assert saved.manifest.data_state == expected.manifest.data_state
    assert saved.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert saved.tensors[name].tobytes() == tensor.tobytes(), name


ZERO = {"zero": True}
SOURCES = {
    "the second rank": {"mesh": {"data": 2}, "blocks": {1: ("source", 9)}},
    "the rank that saves": {"mesh": {"data": 2}, "blocks": {0: ("source", 9)}},
    "two ranks at two steps": {
        "mesh": {"data": 3},
        "blocks": {0: ("source", 9), 2: ("source", 8)},
    },
    "a rank that has parts": {"mesh": {"data": 2}, "job": ZERO, "blocks": {1: ("source", 9)}},
    "the first stage": {"mesh": {"stage": 2}, "blocks": {0: ("source", 9)}},
    "the last stage": {"mesh": {"stage": 2}, "blocks": {1: ("source", 9)}},
    "a stage amid a step": {
        "mesh": {"stage": 2},
        "job": {"accumulate": 2},
        "blocks": {1: ("source", 16)},
    },
    "before the first step": {"mesh": {"data": 2}, "blocks": {1: ("source", 1)}},
    "between two snapshots": {"mesh": {"data": 2}, "every": 4, "blocks": {1: ("source", 11)}},
    "after a checkpoint": {"mesh": {"data": 2}, "every": 4, "blocks": {1: ("source", 9)}},
    "of two shapes": {"mesh": {"data": 2}, "shapes": True, "blocks": {1: ("source", 9)}},
    "of two shapes, a stage": {"mesh": {"stage": 2}, "shapes": True, "blocks": {0: ("source", 8)}},
}


@pytest.mark.thinned(10)
@pytest.mark.parametrize("name", SOURCES)
def test_a_stop_while_a_source_blocks_saves_the_last_step_of_all(tmp_path, name):
    case = SOURCES[name]
    accumulate = case.get("job", {}).get("accumulate", 1)
    first = min(batch for _, batch in case["blocks"].values())
    step = (first - 1) // accumulate
    code, _, err = blocked(tmp_path, case)
    assert code == 128 + signal.SIGTERM, err
    saved = CheckpointManager(tmp_path / "run").latest()
    if not step:
        assert saved is None
        return
    if case.get("shapes"):  # batches are read ahead of the steps that have begun
        step = min(step, saved.manifest.step)
    assert_equal(saved, undisturbed(tmp_path, case, step))
    assert saved.manifest.step == step


@pytest.mark.thinned(2)
@pytest.mark.parametrize("axes", [{"data": 2}, {"stage": 2}])
def test_a_stop_while_a_callback_of_one_rank_hangs_saves_a_step(tmp_path, axes):
    case = {"mesh": axes, "blocks": {1: ("on_step", 5)}}
    code, _, err = blocked(tmp_path, case, sends=signal.SIGINT)
    assert code == 128 + signal.SIGINT, err
    saved = CheckpointManager(tmp_path / "run").latest()
    assert saved.manifest.step >= 5
    assert_equal(saved, undisturbed(tmp_path, case, saved.manifest.step))


def test_a_rank_that_is_stopped_goes_on_to_the_end_that_was_asked_for(tmp_path):
    case = {"mesh": {"data": 2}, "job": ZERO, "blocks": {1: ("told", 5)}}
    code, _, err = blocked(tmp_path, case, stops=True, sends=signal.SIGHUP)
    assert code == 128 + signal.SIGHUP, err
    saved = CheckpointManager(tmp_path / "run").latest()
    assert saved.manifest.step >= 5
    assert_equal(saved, undisturbed(tmp_path, case, saved.manifest.step))


NORMED = {
    "whole batches": {"mesh": {"data": 2}, "every": 4},
    "several batches a step": {"mesh": {"data": 2}, "job": {"accumulate": 2}},
    "parts": {"mesh": {"data": 2}, "job": ZERO},
    "an early stage": {"mesh": {"stage": 2}},
    "several batches of a stage": {"mesh": {"stage": 2}, "job": {"accumulate": 2}},
    "an early stage of each replica": {"mesh": {"stage": 2, "data": 2}},
}


@pytest.mark.thinned(6)
@pytest.mark.parametrize("name", NORMED)
def test_what_a_batch_norm_keeps_is_of_the_last_step_of_all(tmp_path, name):
    """Its count of batches, and in an early stage its statistics, need no other rank."""
    case = {"every": 1000, **NORMED[name], "net": "Normed"}
    last = math.prod(case["mesh"].values()) - 1
    case["blocks"] = {last: ("source", 15)}
    code, _, err = blocked(tmp_path, case)
    assert code == 128 + signal.SIGTERM, err
    saved = CheckpointManager(tmp_path / "run").latest()
    assert saved.manifest.step == 14 // case.get("job", {}).get("accumulate", 1)
    assert saved.tensors["norm.num_batches_tracked"] == 14
    assert_equal(saved, undisturbed(tmp_path, case, saved.manifest.step))


def test_a_step_that_is_not_whole_is_not_saved_and_the_newest_checkpoint_is_named(tmp_path):
    """Without what orders writes, the count of batches is changed at the beginning of a step."""
    case = {"mesh": {"data": 2}, "every": 4, "net": "Normed", "blocks": {1: ("source", 7)}}
    code, _, err = blocked(tmp_path, case | {"writes_at_once": True})
    assert code == 1
    assert (
        "the data source of rank 1 gave no batch for step 7 while the run was stopping, and"
        " other ranks had started that step, which updates 'norm.num_batches_tracked' in place: the"
        " state after step 6 is lost and not saved; the newest checkpoint is of step 4"
    ) in err
    assert CheckpointManager(tmp_path / "run").latest().manifest.step == 4
