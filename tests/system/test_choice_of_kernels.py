"""Which kernels a plan has, and what is said where a resumed run has others."""

import threading

import numpy as np
import pytest

import actorflow as af
from actorflow import nn
from actorflow.distributed import agreed_plan
from actorflow.environment import native as native_module
from actors.kernels.library import tuning


class Layer(nn.Module):
    def __init__(self):
        self.layer = nn.Linear(64, 64)


def loss_of(model, batch):
    return model.layer(batch.x).mean()


@pytest.mark.no_gpu("it is about how the host's kernels are chosen")
def test_a_deterministic_job_stays_so_while_another_thread_compiles(native, monkeypatch):
    """The other thread asks for its own choice in the middle of the deterministic compilation."""

    def traced_loss(model, batch):
        loss = loss_of(model, batch)
        traced.set()
        return loss

    fixed = af.job(loss_of, optimizer=af.optim.SGD(0.1), deterministic=True)
    free = af.job(traced_loss, optimizer=af.optim.SGD(0.1))
    spec = {"x": af.TensorType(af.DType.FLOAT32, (64, 64))}
    inside, traced = threading.Event(), threading.Event()
    seen, could_choose = {}, []
    compiled = agreed_plan.compiled_plan

    def ask():
        """Try, as any other thread, to have a say in how kernels are chosen."""
        could_choose.append(native_module._choice.acquire(blocking=False))

    def watched(*arguments):
        if threading.current_thread().name == "fixed":
            inside.set()
            assert traced.wait(60)
            probe = threading.Thread(target=ask)
            probe.start()
            probe.join(60)
        plan = compiled(*arguments)
        seen[threading.current_thread().name] = tuning.epoch()
        return plan

    monkeypatch.setattr(agreed_plan, "compiled_plan", watched)
    threads = [
        threading.Thread(target=job.compile, args=(Layer(), spec), name=name)
        for name, job in (("fixed", fixed), ("free", free))
    ]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert could_choose == [False]
    assert seen.keys() == {"fixed", "free"}
    assert (seen["fixed"], seen["free"].partition("-")[0]) == ("rule", "table")


@pytest.fixture
def resumed(classify, mlp, classification, tmp_path, capsys):
    """What a run says that goes on from a checkpoint, after a change of what that one recorded."""

    def run(change, monkeypatch):
        from actorflow.checkpoint.manager import CheckpointManager

        save = CheckpointManager.save

        def changed(self, step, groups, *, config, **others):
            return save(self, step, groups, config=change(dict(config)), **others)

        with monkeypatch.context() as patch:
            patch.setattr(CheckpointManager, "save", changed)
            classify().fit(mlp(), classification(), steps=2, checkpoint=tmp_path / "run")
        capsys.readouterr()
        classify().fit(mlp(), classification(), steps=4, checkpoint=tmp_path / "run")
        done = capsys.readouterr()
        return done.out + done.err

    return run


def _other(config):
    config["kernels"] = dict.fromkeys(config["kernels"], "other.kernel")
    return config


def _old(config):
    del config["kernels"]
    return config


def test_a_run_that_continues_with_other_kernels_says_so(resumed, monkeypatch):
    said = " ".join(resumed(_other, monkeypatch).split())
    assert "continues with other kernels (" in said
    assert "in place of other.kernel" in said
    assert "not bit for bit; deterministic=True fixes the choice" in said


@pytest.mark.parametrize(
    ("kernel", "shown"),
    [("\x1b[2J\x07", r"\x1b[2J\x07"), ("a\nb", r"a\nb"), ("\u202eexe", r"\u202eexe"),
     (["\x1b"], r"['\x1b']"), (3, "3"), ("k" * 10_000, "kkk...")],
)  # fmt: skip
def test_what_a_checkpoint_says_of_kernels_is_shown_as_text(resumed, monkeypatch, kernel, shown):
    def change(config):
        return config | {"kernels": dict.fromkeys(config["kernels"], kernel)}

    said = resumed(change, monkeypatch)
    (line,) = [line for line in said.splitlines() if "other kernels" in line]
    assert shown in line
    assert line.isprintable()
    assert len(line) < 800


@pytest.mark.parametrize("change", [_old, dict], ids=["older", "same"])
def test_the_same_kernels_and_checkpoints_that_do_not_name_them_pass_in_silence(
    change, resumed, monkeypatch
):
    assert "kernels" not in resumed(change, monkeypatch)


@pytest.mark.parametrize("shape", [(1, 1), (8, 1), (1, 8), (1,)])
def test_dropout_of_few_elements_runs_natively_with_numpys_bits(shape, native, monkeypatch):
    class Scale(nn.Module):
        def __init__(self):
            self.layer = nn.Linear(shape[-1], shape[-1])

    def loss(model, batch):
        return af.dropout(af.tanh(model.layer(batch.x)), 0.5).mean()

    found = []
    for is_native in ("1", "0"):
        monkeypatch.setenv("ACTORFLOW_NATIVE", is_native)
        job = af.job(loss, optimizer=af.optim.SGD(0.1))
        model = Scale()
        found.append([job.step(model, {"x": np.ones(shape, np.float32)})["loss"] for _ in range(4)])
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-7)
