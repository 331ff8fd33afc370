"""A plan is enough: another process trains from the file without the model's code."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from compiler.contract.plan import Plan
from compiler.contract.plan_tables import RegisterKind

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import numpy as np
import actorflow as af
from actorflow import nn

class Model(nn.Module):
    def __init__(self):
        self.emb, self.head = nn.Embedding(128, 16), nn.Linear(16, 128)

    def __call__(self, x):
        return self.head(self.emb(x))

@af.job(optimizer=af.optim.AdamW(1e-2))
def train(model, batch):
    return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())

if __name__ == "__main__":
    data = af.data.Tokens.from_files("text.txt", seq=8, batch=4)
    train.fit(Model(), data, steps=12, checkpoint="by-script", every=4, progress=False)
"""


@pytest.fixture
def actorflow(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)

    def run(*arguments, code=0):
        program = "import sys; from actorflow.cli.main import main; sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            cwd=tmp_path,
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


def newest(run):
    manifest = max(run.glob("step-*")) / "manifest.json"
    body = json.loads(manifest.read_text().splitlines()[0])
    return body["step"], sorted((p["tensor"], p["offset"], p["xxh3_128"]) for p in body["pieces"])


def test_a_plan_file_trains_to_the_same_bytes_as_the_script(actorflow, tmp_path):
    shown = actorflow("plan", "script.py", "--save", "p.plan").stdout
    assert "plan 'train'" in shown
    assert "snapshot" in shown
    assert not (tmp_path / "by-script").exists()
    actorflow("run", "script.py")
    (tmp_path / "script.py").unlink()
    actorflow("run", "p.plan", "--text", "text.txt", "--steps", "12", "--checkpoint", "by-plan")
    assert newest(tmp_path / "by-plan") == newest(tmp_path / "by-script")
    assert actorflow("ckpt", "verify", "by-plan").stdout.count("valid") >= 1


def test_the_whole_plan_can_be_printed_and_simulated(actorflow):
    actorflow("plan", "script.py", "--save", "p.plan")
    shown = actorflow("plan", "p.plan", "--full").stdout
    assert re.search(r"\[\w+\.\S*(matmul|fused_product|region)\]: ", shown)
    assert "stream compute" in actorflow("simulate", "p.plan", "--steps", "50").stdout


def test_checkpoints_are_listed_as_a_table_of_step_size_tensors_time_and_problems(
    actorflow, tmp_path
):
    actorflow("run", "script.py")
    manifest = next((tmp_path / "by-script").glob("step-*8")) / "manifest.json"
    manifest.write_text("{}")
    head, *rows = actorflow("ckpt", "ls", "by-script").stdout.splitlines()
    assert head.split() == ["step", "size", "tensors", "pieces", "ranks", "saved", "notes"]
    by_step = {int(row.split()[0]): row for row in rows}
    assert sorted(by_step) == [4, 8, 12]
    saved = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(rf" +12 +\d+\.\d [KM]iB( +\d+){{2}} +1  {saved}", by_step[12])
    assert "manifest" in by_step[8]


def test_an_error_of_the_script_keeps_its_own_traceback(actorflow, tmp_path):
    (tmp_path / "opens.py").write_text("def load():\n    open('nowhere.txt')\n\nload()\n")
    for command in ("run", "plan"):
        text = actorflow(command, "opens.py", code=1).stderr
        assert "Traceback" in text
        assert 'opens.py", line 2, in load' in text
        assert text.rstrip().endswith("FileNotFoundError: [Errno 2] No such file or directory:"
                                      " 'nowhere.txt'")  # fmt: skip


def overlapping(plan):
    """Move two registers of the plan's variables onto each other."""
    first, second = [r for r in plan.registers if r.kind is RegisterKind.VARIABLE][:2]
    moved = replace(second, offsets_bytes=first.offsets_bytes)
    return replace(plan, registers=tuple(moved if r is second else r for r in plan.registers))


def pointing_nowhere(plan):
    """Let a view name a register that does not exist."""
    return replace(plan, views=(replace(plan.views[0], register=10**6), *plan.views[1:]))


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (overlapping, "p.plan cannot run"),
        (pointing_nowhere, "p.plan: views[0].register is 1000000, and the table"),
    ],
)
@pytest.mark.parametrize(
    "command", [("run", "--text", "text.txt", "--steps", "1"), ("plan",), ("simulate",)]
)
def test_a_plan_file_that_was_changed_is_refused_before_it_is_used(
    actorflow, tmp_path, change, said, command
):
    actorflow("plan", "script.py", "--save", "p.plan")
    path = tmp_path / "p.plan"
    change(Plan.load(path)).save(path)
    done = actorflow(command[0], "p.plan", *command[1:], code=1)
    assert re.sub("plan '.*?'", "p.plan", done.stderr).count(said) == 1
    assert "again" in done.stderr
    assert "Traceback" not in done.stderr
    assert "bug" not in done.stderr


def test_a_plan_that_takes_snapshots_trains_without_a_checkpoint_directory(actorflow):
    actorflow("plan", "script.py", "--save", "p.plan")
    assert "5 steps done" in actorflow("run", "p.plan", "--text", "text.txt", "--steps", "5").stdout


def test_damage_is_found_by_verify_with_exit_code_1(actorflow, tmp_path):
    actorflow("run", "script.py")
    shard = next((tmp_path / "by-script").glob("step-*/model*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert "DAMAGED" in actorflow("ckpt", "verify", "by-script", code=1).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "nowhere.py"), "nowhere.py"),
        (("plan", "nowhere.plan"), "nowhere.plan"),
        (("run", "text.txt", "--text", "text.txt", "--steps", "1"), "text.txt is not"),
        (("ckpt", "ls", "nowhere"), "nowhere: no such directory"),
    ],
)
def test_wrong_arguments_are_answered_in_one_line_with_exit_code_1(actorflow, arguments, words):
    done = actorflow(*arguments, code=1)
    assert words in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_ops_prints_the_table_of_ops_and_columns(actorflow):
    table = actorflow("ops").stdout
    assert "| matmul |" in table
    assert "gradient" in table.splitlines()[0]
