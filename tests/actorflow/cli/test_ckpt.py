import json
import os

import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file

from actorflow.checkpoint.manager import CheckpointManager, SavedFacts
from actorflow.checkpoint.shard import TensorEntry
from actorflow.cli.main import main


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints of steps 1, 2 and 3, the second one damaged."""
    folder = tmp_path / "run"
    with CheckpointManager(folder, keep_last=9) as manager:
        for step in (1, 2, 3):
            manager.save(
                step, {"model": {"w": np.arange(4.0)}}, seed=0, plan_hash="", config={},
                data_state=None, data_fingerprint="",
            )  # fmt: skip
    shard = folder / "step-0000000002" / "model-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    return folder


@pytest.fixture
def ckpt(capsys):
    def call(*arguments):
        code = main(["ckpt", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err

    return call


def test_all_checkpoints_of_a_run_are_verified(ckpt, run):
    code, lines, _ = ckpt("verify", run)
    assert code == 1
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 2", "step 3"]
    assert [("valid" in line, "DAMAGED" in line) for line in lines] == [
        (True, False), (False, True), (True, False),
    ]  # fmt: skip


@pytest.mark.parametrize("ending", ["", "/", "/."])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_one_checkpoint_is_verified_alone(ckpt, run, step, ending):
    code, lines, _ = ckpt("verify", f"{run}/step-{step:010d}{ending}")
    assert code == int(step == 2)
    (line,) = lines
    assert line.startswith(f"step {step}: ")


def test_one_checkpoint_is_verified_from_inside(ckpt, run, monkeypatch):
    monkeypatch.chdir(run / "step-0000000003")
    code, (line,), _ = ckpt("verify", ".")
    assert code == 0
    assert line.startswith("step 3: valid, 1 tensors")


def test_a_run_that_is_called_like_a_checkpoint_is_a_run(ckpt, run, tmp_path):
    folder = tmp_path / "step-0000000007"
    run.rename(folder)
    assert len(ckpt("verify", folder)[1]) == 3


def test_one_checkpoint_is_listed_alone(ckpt, run):
    code, lines, _ = ckpt("ls", run / "step-0000000003")
    assert code == 0
    assert [line.split()[0] for line in lines] == ["step", "3"]


def test_what_is_not_there_is_said(ckpt, run, tmp_path):
    for action in ("ls", "verify"):
        code, lines, error = ckpt(action, tmp_path / "nowhere")
        assert (code, lines) == (1, [])
        assert "nowhere: no such directory" in error
    assert ckpt("verify", run, "--step", "9")[0] == 1
    (tmp_path / "step-0000000005").mkdir()
    code, (line,), _ = ckpt("verify", tmp_path / "step-0000000005")
    assert code == 1
    assert line.startswith("step 5: DAMAGED")


def test_a_file_of_any_time_is_listed(ckpt, run):
    os.utime(run / "step-0000000001" / "manifest.json", ns=(0, 2**62))
    assert ckpt("ls", run)[0] == 0


@pytest.mark.parametrize("count", [0, 1, 3])
def test_what_lies_hidden_in_a_run_is_counted(ckpt, run, count):
    for number, kind in enumerate(["aside-step", "trash-step", "tmp"][:count]):
        (run / f".{kind}-0000000009-{number:032x}").mkdir()
    (run / ".aside-of-somebody").mkdir()
    _, lines, _ = ckpt("ls", run)
    said = f"{count} hidden, of checkpoints that were replaced or not finished"
    assert [said in line for line in lines].count(True) == bool(count)


@pytest.fixture
def sharded(tmp_path):
    """A run with a checkpoint of two ranks."""
    folder = tmp_path / "sharded"
    facts = SavedFacts(0, "", {}, None, "")
    whole = np.arange(12.0).reshape(4, 3)
    with CheckpointManager(folder) as manager:
        draft = manager.draft(7, facts, (TensorEntry("w", "float64", (4, 3)),), 2)
        manager.begin(draft, 0)
        written = [
            manager.write(
                7, draft.attempt, {f"model-rank{rank}": {"w": whole[2 * rank : 2 * rank + 2]}},
                {"w": ((4, 3), (2 * rank, 0))},
            )
            for rank in range(2)
        ]  # fmt: skip
        manager.commit(draft, written)
    return folder


def test_pieces_and_ranks_are_told(ckpt, sharded):
    _, (head, row), _ = ckpt("ls", sharded)
    assert head.split()[2:5] == ["tensors", "pieces", "ranks"]
    assert row.split()[3:6] == ["1", "2", "2"], "after the step, and a size with its unit"
    assert "1 tensors in 2 pieces of 2 ranks" in ckpt("verify", sharded)[1][0]


def test_pieces_that_leave_a_gap_are_not_valid(ckpt, sharded):
    path = sharded / "step-0000000007" / "manifest.json"
    body = json.loads(path.read_bytes().splitlines()[0])
    del body["pieces"][1], body["files"][1]
    text = json.dumps(body).encode()
    path.write_bytes(text + b"\n" + xxhash.xxh3_128_hexdigest(text).encode())
    code, (line,), _ = ckpt("verify", sharded)
    assert code == 1
    assert "tensor 'w' has 12 elements, and its pieces have 6" in line


def test_the_model_is_exported_without_its_optimizer(ckpt, tmp_path):
    weight, moment = np.arange(4.0), np.ones(4)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(
            5, {"model": {"w": weight}, "optim": {"adam_m/w": moment, "step": np.array(5)}}, seed=0,
            plan_hash="", config={}, data_state=None, data_fingerprint="",
        )  # fmt: skip
    file = tmp_path / "w.safetensors"
    for chosen in ([], ["--step", 5]):
        code, (line,), _ = ckpt("export", "--model", tmp_path / "run", file, *chosen)
        assert code == 0
        assert line.startswith("step 5: 1 tensors in ")
        (only,) = load_file(file).items()
        np.testing.assert_array_equal(only[1], weight)
        file.unlink()


def test_whole_tensors_are_exported(ckpt, sharded, tmp_path):
    file = tmp_path / "w.safetensors"
    code, (line,), _ = ckpt("export", sharded, file)
    assert code == 0
    assert line.startswith("step 7: 1 tensors in ")
    np.testing.assert_array_equal(load_file(file)["w"], np.arange(12.0).reshape(4, 3))
    code, _, error = ckpt("export", sharded, file)
    assert code == 1
    assert "EEXIST" in error
    assert ckpt("export", sharded, tmp_path / "x", "--step", "9")[0] == 1
    assert ckpt("export", tmp_path, tmp_path / "x")[0] == 1
    assert not (tmp_path / "x").exists()


def test_checkpoints_are_told_as_json(ckpt, run):
    code, (line,), _ = ckpt("ls", run, "--json")
    rows = json.loads(line)
    assert (code, [row["step"] for row in rows]) == (0, [1, 2, 3])
    code, (line,), _ = ckpt("verify", run, "--json")
    verified = json.loads(line)
    assert (code, [row["is_valid"] for row in verified]) == (1, [True, False, True])
    assert "step-0000000002" in verified[1]["problem"]
    code, (line,), _ = ckpt("verify", run, "--step", "3", "--json")
    assert (code, json.loads(line)) == (0, [verified[2]])
