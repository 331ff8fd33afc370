"""`actorflow replay`: a past step computed again by the run's own command."""

import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from actorflow.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.host("scripts of their own, which say where they run")

SCRIPT = """
import sys
import numpy as np
import actorflow as af
from actorflow import nn

class Net(nn.Module):
    def __init__(self):
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def __call__(self, x):
        return self.head(af.tanh(self.first(x)))

options, run = sys.argv[1], sys.argv[2]
x = np.random.default_rng(0).standard_normal((160, 4)).astype(np.float32)
x[77, 2] = 1e30
data = af.data.from_arrays({"x": x, "y": np.sign(x[:, :1])}).repeat().batch(8)

@af.job(optimizer=af.optim.AdamW(1e-2), **eval(options))
def train(model, batch):
    size = (batch.x * 1e12).sum(axis=1, keepdim=True)  # planted: overflows for row 77
    return ((model(batch.x / 1e30) - batch.y) ** 2.0 + 0.0 * size).mean()

class Told:
    def on_start(self, run):
        print("a callback began")

print("the script began")
train.fit(Net(), data, steps=30, checkpoint=run, every=4, callbacks=[Told()])
print("the script went on")
"""
LINE = 1 + next(i for i, text in enumerate(SCRIPT.splitlines()) if "# planted" in text)


def started(folder, options="{}", ranks=1, script=SCRIPT, said="loss is nan at step"):
    """Run the script in a folder until its loss ends it, or another script."""
    (folder / "train.py").write_text(script, encoding="utf-8")
    program = [sys.executable]
    if ranks > 1:
        program += ["-m", "actorflow", "launch", "-n", str(ranks)]
    words = [*program, "train.py", options, "run"]
    done = subprocess.run(
        words, check=False, cwd=folder, env=environment(), capture_output=True, text=True
    )
    assert said in done.stderr + done.stdout, done.stderr
    return folder / "run"


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT), "ACTORFLOW_NATIVE": "0"}


def replay(run, *words):
    command = [sys.executable, "-m", "actorflow", "replay", str(run), *words]
    return subprocess.run(command, check=False, env=environment(), capture_output=True, text=True)


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    return started(tmp_path_factory.mktemp("broken"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that came to its end."""
    script = changed(("x[77, 2] = 1e30", ""))
    return started(tmp_path_factory.mktemp("whole"), script=script, said="step 30/30")


def result_of(run, *words):
    done = replay(run, "--json", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout, parse_constant=pytest.fail)


def changed(*pairs, script=SCRIPT):
    for old, new in pairs:
        assert old in script
        script = script.replace(old, new)
    return script


def test_the_step_that_ended_a_run_names_op_line_and_row(broken):
    before = {path: path.read_bytes() for path in broken.rglob("*") if path.is_file()}
    (step,) = result_of(broken)["steps"]
    assert step["step"] == json.loads((broken / "non_finite.json").read_text())["step"]
    first = next(v for v in step["values"] if v["num_nan"] or v["num_inf"])
    assert (first["what"], first["line"]) == ("mul", f"train.py:{LINE}")
    (batch,) = step["batches"]
    losses = [float(loss) for loss in batch["row_losses"]]
    (row,) = [i for i, loss in enumerate(losses) if not abs(loss) < float("inf")]
    assert batch["origins"][row] == "row 77 of the arrays"
    assert step["compared"]["num_values"] > 0
    assert step["compared"]["num_different"] == 0
    # A replay looks only.
    assert {path: path.read_bytes() for path in broken.rglob("*") if path.is_file()} == before


def test_what_the_script_prints_is_kept_apart_and_callbacks_are_not_called(broken):
    done = replay(broken)
    assert done.returncode == 0, done.stderr
    assert "the script began" in done.stderr
    assert "the script went on" not in done.stdout + done.stderr
    assert "a callback began" not in done.stdout + done.stderr
    assert "the first value that is not finite" in done.stdout
    assert "same bits as metrics.jsonl" in done.stdout
    assert all(line.isprintable() for line in done.stdout.splitlines())


def test_an_op_is_shown_whole_with_what_it_reads(broken):
    (step,) = result_of(broken, "--step", "2", "--at", "tanh")["steps"]
    by_number = {value["number"]: value for value in step["values"]}
    (tanh,) = [v for v in step["values"] if v["what"] == "tanh"]
    detail = tanh["detail"]
    assert detail["shape"] == [8, 8]
    assert sum(detail["histogram"]) == 64
    assert detail["first_not_finite"] is None
    assert abs(sum(x * x for x in detail["head"])) <= tanh["norm"] ** 2
    (read,) = tanh["inputs"]
    assert by_number[read]["detail"]["shape"] == [8, 8]
    shown = replay(broken, "--step", "2", "--at", "tanh", "--print", "*head*").stdout
    assert "reads add in 'first'" in shown
    assert "values of '*head*'" in shown


def test_two_steps_are_set_against_each_other(broken):
    one, other = result_of(broken, "--step", "3", "--against", "2")["steps"]
    assert (one["step"], other["step"]) == (3, 2)
    assert one["outputs"] != other["outputs"]
    assert "step 3 against step 2" in replay(broken, "--step", "3", "--against", "2").stdout


def test_a_replay_begins_at_the_newest_checkpoint_before_the_step(whole):
    steps = sorted(int(path.name.split("-")[-1]) for path in whole.glob("step-*"))
    assert steps == [24, 28, 30]
    late, on_it = result_of(whole, "--step", "29", "--against", "28")["steps"]
    assert (late["first_step"], on_it["first_step"]) == (28, 24)
    assert not any("from the beginning" in note for note in late["notes"] + on_it["notes"])
    (early,) = result_of(whole, "--step", "24")["steps"]
    assert early["first_step"] == 0
    assert "replayed from the beginning" in early["notes"][-1]


def test_a_script_that_has_changed_is_said_to_be_another(broken, tmp_path):
    run = started(tmp_path)
    script = tmp_path / "train.py"
    text = script.read_text()
    script.write_text(text.replace("np.sign", "np.tanh").replace(" ** 2.0", " ** 4.0"))
    (step,) = result_of(run, "--step", "1")["steps"]
    assert step["compared"]["num_different"] == 1
    shown = replay(run, "--step", "1").stdout
    assert "NOT the run's own" in shown
    assert "the plan is another" in shown
    assert "the data is another" in shown


@pytest.mark.parametrize(("words", "text"), [
    (["--step", "0"], "give one of 1 to"),
    (["--step", "1000"], "has made"),
    (["--step", "2", "--against", "-1"], "--against -1"),
    (["--step", "2", "--at", "nothing*"], "no op of the step has this name"),
])  # fmt: skip
def test_what_cannot_be_shown_is_named(broken, words, text):
    done = replay(broken, *words)
    assert done.returncode == 1
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_without_that_fit_is_named(broken, tmp_path, capfd):
    run = tmp_path / "run"
    run.mkdir()
    record = json.loads((broken / "run.json").read_text())
    (tmp_path / "other.py").write_text("print('nothing to train')")
    record["starts"][0] |= {"command": [sys.executable, "other.py"], "folder": str(tmp_path)}
    (run / "run.json").write_text(json.dumps(record))
    (run / "status.json").write_bytes((broken / "status.json").read_bytes())
    assert main(["replay", str(run), "--step", "1"]) == 1
    assert "without a fit with checkpoint=" in capfd.readouterr().err


def test_a_run_that_was_moved_is_replayed_where_it_is(tmp_path):
    # Its script goes elsewhere itself, so what it was started in is another folder than fit's.
    script = changed(("import sys", "import os, sys\nos.path.isdir('sub') or os.mkdir('sub')"),
                     ("options, run =", "os.chdir('sub')\noptions, run ="))  # fmt: skip
    started(tmp_path, script=script)
    run, moved = tmp_path / "sub" / "run", tmp_path / "moved"
    run.rename(moved)
    (step,) = result_of(moved, "--step", "2")["steps"]
    assert step["compared"]["num_values"] > 0
    assert step["compared"]["num_different"] == 0
    assert not run.exists()


def test_a_fit_that_cannot_replay_does_not_train_on(tmp_path):
    run = started(tmp_path)
    script = tmp_path / "train.py"
    fit = "af.Runner(train.compile(Net(), data, every=4)).fit(data,"
    script.write_text(changed(("train.fit(Net(), data,", fit)))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = replay(run, "--step", "2")
    assert done.returncode == 1
    assert "a replay changes nothing of run" in done.stderr
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_values_of_skipped_steps_are_no_difference_and_json_is_strict(tmp_path):
    # The norm of the planted row is beyond float32.
    script = changed(("x[77, 2] = 1e30", "x[79] = 3e38"), ("every=4", "every=4, on_nan='skip'"))
    run = started(tmp_path, script=script, said="is skipped: loss is")
    (step,) = result_of(run, "--step", "30")["steps"]
    assert step["outputs"]["loss"] == "nan"
    assert step["compared"]["num_different"] == 0
    batch = next(value for value in step["values"] if value["what"] == "batch['x']")
    assert batch["norm"] == "inf"


def test_steps_before_one_whose_overflows_ended_the_run_are_replayed(tmp_path):
    script = changed(("batch.x * 1e12", "batch.x * 1e30 * 1e30"))
    run = started(tmp_path, "dict(precision='fp16')", script=script, said="overflow float16")
    (step,) = result_of(run, "--step", "10")["steps"]
    assert step["outputs"]["loss"] == "nan"
    assert step["compared"]["num_different"] == 0


def test_what_a_callback_of_the_training_writes_counts_in_a_replay(tmp_path):
    watched = """
model = Net()
model.plateau = nn.Buffer((4,), dtype="float64")
plateau = af.optim.ReduceLROnPlateau(model.plateau, 0.1, factor=0.5, patience=0, threshold=10.0)
job = af.job(lambda m, b: {"loss": ((m(b.x) - b.y) ** 2.0).mean()}, optimizer=af.optim.SGD(plateau))
watch = af.job(lambda m, b: {"loss": ((m(b.x) - b.y) ** 2.0).mean()}, train=False)
others = af.data.from_arrays({"x": x[:32], "y": np.sign(x[:32, :1])}).batch(8)
watched = af.Evaluation(watch, others, every=5, batches=2)
job.fit(model, data, steps=30, checkpoint=run, every=5, callbacks=[plateau], evaluation=watched)
"""
    script = changed(("x[77, 2] = 1e30", ""))
    script = script[: script.index("@af.job")] + watched
    run = started(tmp_path, script=script, said="step 30/30")
    for step, first in (("9", 0), ("24", 20)):
        (shown,) = result_of(run, "--step", step)["steps"]
        assert shown["first_step"] == first
        assert shown["compared"]["steps"][-1] == 30
        assert shown["compared"]["num_different"] == 0


def test_the_fit_that_trains_so_far_is_replayed_and_other_data_is_said(tmp_path):
    twice = """
def rows(scale):
    return af.data.from_arrays({"x": x * scale, "y": np.sign(x[:, :1])}).repeat().batch(8)

model, keep = Net(), af.Keep(last=100)
train.fit(model, rows(1.0), steps=12, checkpoint=run, every=4, keep=keep)
train.fit(model, rows(0.5), steps=30, checkpoint=run, every=4, keep=keep, resume="changed")
"""
    script = changed(("x[77, 2] = 1e30", ""), ("batch.x / 1e30", "batch.x"), (" + 0.0 * size", ""))
    script = script[: script.index("class Told")] + twice
    run = started(tmp_path, script=script, said="step 30/30")
    for step, first in (("22", 20), ("14", 12), ("7", 4)):
        (shown,) = result_of(run, "--step", step)["steps"]
        assert shown["first_step"] == first
        assert shown["compared"]["num_different"] == 0
        assert not any("made on other data" in note for note in shown["notes"])
    text = (tmp_path / "train.py").read_text()
    (tmp_path / "train.py").write_text(text.replace("steps=12", "steps=24"))
    (shown,) = result_of(run, "--step", "14")["steps"]
    assert "made on other data than that of this fit" in shown["notes"][0]


def test_the_first_broken_value_of_a_loop_is_that_of_the_first_iteration(tmp_path):
    looped = """
        xs = af.stack([x, x, x])
        add = lambda h, x: (h + x * 1e9, h)
        return self.head(af.tanh(self.first(x + 0.0 * af.scan(add, x * 0.0, xs)[0])))
"""
    body = "        return self.head(af.tanh(self.first(x)))\n"
    script = changed((body, looped), ("batch.x / 1e30", "batch.x"), (" + 0.0 * size", ""))
    done = replay(started(tmp_path, script=script))
    lines = done.stdout.splitlines()
    first = lines[lines.index("the first value that is not finite") + 1]
    assert first.startswith("  mul")
    assert "iteration 0)" in first
    assert " 0 NaN, " in first
    assert "the first value with a NaN" in lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_script_too(broken, tmp_path, number):
    run = tmp_path / "run"
    run.mkdir()
    record = json.loads((broken / "run.json").read_text())
    (tmp_path / "train.py").write_text(
        "import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()"
    )
    record["starts"][0] |= {"command": [sys.executable, "train.py"], "folder": str(tmp_path)}
    (run / "run.json").write_text(json.dumps(record))
    (run / "status.json").write_bytes((broken / "status.json").read_bytes())
    command = [sys.executable, "-m", "actorflow", "replay", str(run), "--step", "1"]
    with subprocess.Popen(
        command, env=environment(), stderr=subprocess.PIPE, text=True
    ) as replaying:
        replaying.stderr.readline()
        script = os.pidfd_open(int(replaying.stderr.readline()))
        replaying.send_signal(number)
        killed = number == signal.SIGKILL
        assert replaying.wait() == (-number if killed else 128 + number)
    ends = select.poll()
    ends.register(script, select.POLLIN)
    assert ends.poll(60_000), "the script goes on"
    os.close(script)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "ranks"), [
    ("dict(mesh=af.Mesh(data=2))", 2),
    ("dict(precision='bf16', accumulate=2)", 1),
])  # fmt: skip
def test_ranks_and_accumulated_batches_are_shown_each(tmp_path, options, ranks):
    run = started(tmp_path, options, ranks)
    (step,) = result_of(run)["steps"]
    assert {value["rank"] for value in step["values"]} == {*range(ranks)}
    broken = [v for v in step["values"] if (v["num_nan"] or v["num_inf"]) and v["phase"]]
    assert (broken[0]["what"], broken[0]["line"]) == ("mul", f"train.py:{LINE}")
    assert step["compared"]["num_different"] == 0
    named = [line for line in replay(run).stdout.splitlines() if ", norm " in line]
    marks = {mark for line in named for mark in re.findall(r"^ *(?:reads )?(\[rank .\])?", line)}
    assert marks == ({f"[rank {rank}]" for rank in range(ranks)} if ranks > 1 else {""})
    if "accumulate" in options:
        assert {value["when"] for value in step["values"]} >= {"batch 1 of 2", "batch 2 of 2"}
        assert len(step["batches"]) == 2
