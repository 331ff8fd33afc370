"""Bad input gets a clear error, and nothing is lost."""

import errno
import os
import re
import signal

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.checkpoint.errors import CheckpointSpaceError, NoValidCheckpoint
from actorflow.checkpoint.manager import CheckpointManager
from compiler.contract.types import DType, TensorType


class Source:
    """Batches from a function of the step; counts are its state."""

    def __init__(self, make, spec=None):
        self.make, self.at = make, 0
        self._spec = spec or {
            "x": TensorType(DType.FLOAT32, (4, 8)),
            "y": TensorType(DType.INT32, (4,)),
        }

    def spec(self):
        return self._spec

    def __next__(self):
        self.at += 1
        return self.make(self.at)

    def state(self):
        return {"at": self.at}

    def restore(self, state):
        self.at = state["at"]

    def fingerprint(self):
        return "source"


def good(step):
    rng = np.random.default_rng(step)
    return {
        "x": rng.normal(size=(4, 8)).astype(np.float32),
        "y": rng.integers(0, 5, 4).astype(np.int32),
    }


def bad_at(step, **changes):
    """Batches that are good but for one step; None removes a key."""

    def make(at):
        batch = good(at)
        if at == step:
            batch.update(changes)
        return {k: v for k, v in batch.items() if v is not None}

    return make


@pytest.mark.parametrize(
    "changes",
    [
        {"x": np.zeros((4, 8))},
        {"x": np.zeros((3, 8), np.float32)},
        {"y": None},
        {"x": [[1.0] * 8] * 4},
    ],
)
def test_a_wrong_batch_names_key_both_types_and_the_users_line(mlp, classify, changes):
    with raises(af.DataError):
        classify().fit(mlp(), Source(bad_at(3, **changes)), steps=9, progress=False)


def test_a_batch_key_that_the_source_lacks_is_named_at_compile_time(mlp):
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        return model(batch.z).mean()

    with raises(af.CompileError):
        train.fit(mlp(), Source(good), steps=1, progress=False)


def test_a_loss_that_is_no_scalar_is_an_error_with_the_users_line(mlp):
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        return model(batch.x)

    with raises(af.CompileError):
        train.fit(mlp(), Source(good), steps=1, progress=False)


def test_a_parameter_used_by_no_path_to_the_loss_is_named_where_it_was_made():
    class Model(nn.Module):
        def __init__(self):
            self.used, self.idle = nn.Linear(8, 5), nn.Linear(8, 5)

        def __call__(self, x):
            return self.used(x)

    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    with raises(af.CompileError):
        train.fit(Model(), Source(good), steps=1, progress=False)


def test_wrong_shapes_name_both_types_and_the_users_line(mlp):
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        return (model(batch.x) + batch.x).mean()

    with raises(af.CompileError):
        train.fit(mlp(), Source(good), steps=1, progress=False)


def test_python_control_flow_on_a_tensor_is_explained(mlp):
    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        loss = model(batch.x).mean()
        return loss if loss > 0 else -loss

    with raises(af.CompileError):
        train.fit(mlp(), Source(good), steps=1, progress=False)


def test_data_too_short_for_one_batch_says_how_much_is_needed():
    with raises(af.DataError):
        af.data.Tokens(np.zeros(10, np.uint8), seq=64, batch=32)


def test_a_source_that_raises_surfaces_after_the_last_finished_step_was_kept(
    mlp, classify, tmp_path
):
    def make(at):
        if at == 6:
            raise RuntimeError("the disk of the data went away")
        return good(at)

    with pytest.raises(RuntimeError, match="went away") as caught:
        classify().fit(
            mlp(), Source(make), steps=50, checkpoint=tmp_path / "run", every="1h", progress=False
        )
    assert any(entry.name == "make" for entry in caught.traceback)
    assert CheckpointManager(tmp_path / "run").latest().manifest.step == 5


def test_a_source_that_ends_early_ends_the_run_with_its_last_step_kept(mlp, classify, tmp_path):
    def make(at):
        if at == 4:
            raise StopIteration
        return good(at)

    result = classify().fit(
        mlp(), Source(make), steps=50, checkpoint=tmp_path / "run", every="1h", progress=False
    )
    assert result.last_step == 3
    assert CheckpointManager(tmp_path / "run").latest().manifest.step == 3


@pytest.fixture
def bad_label(mlp, classify):
    """The error of a job whose second batch has a label that is no class."""

    def fail():
        labels = np.array([0, 1, 9, 2], np.int32)
        with pytest.raises(af.ActorFailed) as caught:
            classify().fit(mlp(), Source(bad_at(2, y=labels)), steps=5, progress=False)
        assert isinstance(caught.value.__cause__, IndexError)
        assert str(caught.value.__cause__) == "label 9 at position 2 is outside 0..4"
        assert "conftest.py:" in caught.value.source
        assert caught.value.firing == 1
        return caught.value

    return fail


def test_a_label_out_of_range_fails_the_step_with_op_and_users_line(bad_label, numpys_kernels):
    error = bad_label()
    assert "cross_entropy" in error.op
    assert f"op {error.op!r} (" in str(error)


def test_a_label_out_of_range_in_a_group_names_the_ops_that_it_is_made_of(bad_label, native):
    error = bad_label()
    assert re.search(r"launch \d+ of \d+, op '[a-z_ +]*cross_entropy", str(error))


def test_a_label_out_of_range_that_the_kernel_itself_holds_is_an_index_error(native):
    job = af.job(lambda model, batch: af.nll_loss(batch.x, 7) / 3, train=False)
    with pytest.raises(af.ActorFailed) as caught:
        job.step(nn.Module(), {"x": np.zeros(5, np.float32)})
    assert isinstance(caught.value.__cause__, IndexError)


def exploding(step):
    batch = good(step)
    batch["x"] = batch["x"] * np.float32(np.nan if step == 3 else 1)
    return batch


def test_a_loss_that_is_not_finite_raises_with_step_and_line(mlp, classify, tmp_path):
    with raises(af.NonFiniteLoss):
        classify().fit(
            mlp(), Source(exploding), steps=9, checkpoint=tmp_path / "run", every=1, progress=False
        )
    newest = CheckpointManager(tmp_path / "run").latest()
    assert all(np.isfinite(a).all() for a in newest.tensors.values())


def test_a_loss_that_is_not_finite_may_be_a_warning(mlp, classify, capsys):
    result = classify().fit(mlp(), Source(exploding), steps=5, on_nan="warn")
    assert result.last_step == 5
    assert capsys.readouterr().out.count("loss is nan at step 3") == 1


def test_under_warn_the_newest_checkpoint_without_nan_is_kept_and_named(
    mlp, classify, tmp_path, caplog
):
    options = {"checkpoint": tmp_path / "run", "every": 1, "keep_last": 2, "on_nan": "warn"}
    classify().fit(mlp(), Source(exploding), steps=9, progress=False, **options)
    assert CheckpointManager(tmp_path / "run").steps() == (2, 8, 9)
    classify().fit(
        mlp(), Source(exploding), steps=10, **{**options, "keep_last": 1}, progress=False
    )
    assert "checkpoint of step 9 holds NaN" in caplog.text
    assert "the newest one without NaN is of step 2" in caplog.text
    assert CheckpointManager(tmp_path / "run").steps() == (2, 10)


def test_a_full_disk_keeps_the_previous_checkpoint_and_names_path_and_bytes(
    mlp, classify, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    classify().fit(mlp(), Source(good), steps=4, checkpoint=run, every=1, progress=False)
    real = os.write

    def full(fd, data):
        if len(data) > 200:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointSpaceError, match=rf"{run}"):
        classify().fit(mlp(), Source(good), steps=9, checkpoint=run, every=1, progress=False)
    monkeypatch.undo()
    assert CheckpointManager(run).latest().manifest.step == 4
    assert not list(run.glob(".tmp-*"))


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_is_used(
    mlp, classify, tmp_path, capsys
):
    run = tmp_path / "run"
    classify().fit(mlp(), Source(good), steps=4, checkpoint=run, every=1, progress=False)
    newest = max(run.glob("step-*"))
    flip_a_bit(next(newest.glob("model*.safetensors")))
    result = classify().fit(mlp(), Source(good), steps=6, checkpoint=run, every=1)
    assert result.first_step == 3
    assert "step-0000000004" in capsys.readouterr().out


def test_if_no_checkpoint_is_valid_the_run_refuses_to_start_fresh(mlp, classify, tmp_path):
    run = tmp_path / "run"
    classify().fit(mlp(), Source(good), steps=4, checkpoint=run, every=1, progress=False)
    for directory in run.glob("step-*"):
        (directory / "manifest.json").write_bytes(b"{")
    with pytest.raises(NoValidCheckpoint):
        classify().fit(mlp(), Source(good), steps=6, checkpoint=run, every=1, progress=False)


def test_other_data_than_the_checkpoint_was_trained_on_is_refused(mlp, classify, tmp_path):
    run = tmp_path / "run"
    classify().fit(mlp(), Source(good), steps=2, checkpoint=run, progress=False)
    other = Source(good)
    other.fingerprint = lambda: "another corpus"
    with raises(af.DataError):
        classify().fit(mlp(), other, steps=4, checkpoint=run, progress=False)


def test_another_model_than_the_checkpoint_holds_is_refused(mlp, classify, tmp_path):
    run = tmp_path / "run"
    classify().fit(mlp(), Source(good), steps=2, checkpoint=run, progress=False)
    with raises(af.CompileError):
        classify().fit(mlp(width=32), Source(good), steps=4, checkpoint=run, progress=False)


def test_a_second_run_on_the_same_directory_is_refused(mlp, classify, tmp_path):
    with CheckpointManager(tmp_path / "run"), raises(af.CheckpointError):
        classify().fit(mlp(), Source(good), steps=2, checkpoint=tmp_path / "run", progress=False)


def test_a_changed_batch_shape_recompiles_and_says_why(mlp, classify, caplog):
    train, model = classify(), mlp()
    train.step(model, good(1))
    train.step(model, {k: v[:2] for k, v in good(2).items()})
    train.close(model)
    reason = "recompiled because batch['x'] changed from float32[4, 8] to float32[2, 8]"
    assert reason in caplog.text


def test_ever_changing_shapes_close_the_plan_used_least_recently(mlp, classify, caplog):
    train, model = classify(max_plans=2), mlp()
    for rows in (4, 3, 4, 2):
        train.step(model, {k: v[:rows] for k, v in good(1).items()})
    train.close(model)
    lines = [text for text in caplog.messages if "used least recently" in text]
    assert lines == [
        "the plan of 'train' for x: float32[3, 8], y: int32[3] is closed: it was used least"
        " recently, and max_plans=2 stay open; a batch of these types loads it again (1 closed so"
        " far)"
    ]


def test_a_failed_job_can_run_again_in_the_same_process(mlp, classify):
    train = classify()
    with pytest.raises(af.ActorFailed):
        train.fit(mlp(), Source(bad_at(1, y=np.full(4, 9, np.int32))), steps=2, progress=False)
    assert train.fit(mlp(), Source(good), steps=3, progress=False).last_step == 3


@pytest.mark.parametrize("wing", ["memory", "compiler", "actors"])
@pytest.mark.parametrize("name", ["{}.py", "{}/__init__.py"])
def test_a_file_beside_the_script_that_is_called_as_a_wing_stops_nothing(
    run_python, tmp_path, wing, name
):
    hidden = tmp_path / name.format(wing)
    hidden.parent.mkdir(exist_ok=True)
    hidden.write_text("size = 1")
    done = run_python(
        f"""
        import numpy as np
        import actorflow as af

        with af.eager():
            print(float(af.exp(af.zeros(()))))
        import {wing}

        print(hasattr({wing}, "__wrapped__"))
        from {wing} import size
        """,
        check=False,
    )
    assert done.stdout.split() == ["1.0", "False"]
    assert f"ImportError: {wing!r} is a package of actorflow in this process" in done.stderr
    assert f"it hides {hidden}: rename that file" in done.stderr


@pytest.mark.parametrize("is_loaded", [True, False])
def test_another_package_called_memory_is_named_with_the_mend(run_python, tmp_path, is_loaded):
    foreign = tmp_path / ("." if is_loaded else "installed") / "memory"
    foreign.mkdir(parents=True)
    (foreign / "__init__.py").write_text("")
    first = "import memory" if is_loaded else f"sys.path.insert(1, {str(foreign.parent)!r})"
    done = run_python(f"import sys\n{first}\nimport actorflow", check=False)
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert str(foreign) in done.stderr
    assert "Rename or move" in done.stderr


def test_no_user_input_ends_the_process_with_a_signal(run_python):
    done = run_python(
        """
        import numpy as np
        import actorflow as af
        from actorflow import nn

        bad = [
            lambda: nn.Linear(4, 4)(None),
            lambda: nn.Attention(10, heads=3),
            lambda: af.optim.SGD(0.1, nesterov=True),
            lambda: af.data.Tokens(np.zeros((2, 2)), seq=1, batch=1),
            lambda: af.data.Tokens(np.zeros(0, np.uint8), seq=1, batch=1),
            lambda: af.Plan.from_bytes(b""),
            lambda: af.job()(lambda model, batch: None),
            lambda: af.optim.cosine(1.0, steps=0)(None),
        ]
        for attempt in bad:
            try:
                attempt()
            except Exception as error:
                print(type(error).__name__)
            else:
                print("no error")
        """
    )
    names = done.stdout.split("\n")
    assert "no error" not in names
    assert done.returncode not in {-signal.SIGSEGV, -signal.SIGABRT}


CALLS = {
    "step": lambda job, model, data: job.step(model, next(data)),
    "fit": lambda job, model, data: job.fit(model, data, steps=1, progress=False),
    "stream": lambda job, model, data: next(iter(job.stream(model, data, steps=1))),
    "compile": lambda job, model, data: job.compile(model, data),
    "eager_step": lambda job, model, data: job.eager_step(model, next(data)),
    "evaluate": lambda job, model, data: job.evaluate(model, data, batches=1),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_job_in_the_function_of_a_job_is_refused_before_it_runs(call, mlp, classify):
    """It would train once, while the outer one is traced, and never again."""
    inner, data, model = classify(), Source(good), mlp().init(0)
    before = model.state()

    @af.job(train=False)
    def outer(model, batch):
        CALLS[call](inner, model, data)
        return model(batch.x)

    with raises(af.CompileError):
        outer.step(model, good(1))
    for name, array in model.state().items():
        np.testing.assert_array_equal(array, before[name])
