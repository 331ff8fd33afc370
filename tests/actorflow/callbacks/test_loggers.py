"""What loggers write: against readers of the formats, and stand-ins with the real signatures."""

import csv
import math
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
from error_texts import raises

import actorflow as af
from actorflow.callbacks import CSV, MLflow, TensorBoard, WandB
from actorflow.callbacks.protocol import StartedRun

RUN = StartedRun(
    job="train", model=None, first_step=0, total_steps=4, directory=None, rank=0,
    outputs=("loss", "accuracy"), evaluated=("loss",), evaluations=(), options={"seed": 7},
)  # fmt: skip


def log(logger, steps=range(1, 5), run=RUN, has_ended=True):
    """Call a logger as a run does: two outputs a step, an array, and an evaluation after two."""
    logger.on_start(run)
    for step in steps:
        logger.on_step(step, {"loss": 1.0 / step, "accuracy": step, "picture": [[0.0]]})
        if step % 2 == 0:
            logger.on_evaluation(step, {"loss": 2.0 / step})
    if has_ended:
        logger.on_end(None)
    logger.close()
    logger.close()


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_table_has_a_row_for_each_step_that_is_due_and_each_evaluation(tmp_path):
    path = tmp_path / "new" / "run.csv"
    log(CSV(path, every=2))
    assert [[*row.values()] for row in rows_of(path)] == [
        ["2", "0.5", "2.0", ""],
        ["2", "", "", "1.0"],
        ["4", "0.25", "4.0", ""],
        ["4", "", "", "0.5"],
    ]
    assert [*rows_of(path)[0]] == ["step", "loss", "accuracy", "evaluation/loss"]


def test_a_table_goes_on_where_the_run_does_and_begins_anew_at_step_0(tmp_path):
    path = tmp_path / "run.csv"
    log(CSV(path))
    whole = path.read_text()
    with path.open("a") as file:
        file.write("5,0.2")  # a kill
    log(CSV(path), steps=[3, 4], run=replace(RUN, first_step=2))
    assert path.read_text() == whole
    log(CSV(path), [3, 4], replace(RUN, first_step=2, outputs=("accuracy", "loss")))
    assert path.read_text() == whole
    log(CSV(path), steps=[1])
    assert len(rows_of(path)) == 1
    with raises(af.CompileError):
        log(CSV(path), run=replace(RUN, first_step=2, outputs=("loss",)))


@pytest.mark.extra("tb")
def test_tensorboard_reads_back_the_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log(TensorBoard(), run=replace(RUN, directory=tmp_path))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    values = {
        tag: [(row.step, float(row.tensor_proto.float_val[0])) for row in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }
    assert values["accuracy"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert values["evaluation/loss"] == [(2, 1.0), (4, 0.5)]
    assert math.isclose(values["loss"][2][1], 1 / 3, rel_tol=1e-6)


def test_a_logger_without_its_package_or_a_folder_says_what_to_do(monkeypatch):
    for name in ("tensorboard.summary", "wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    with raises(af.CompileError):
        TensorBoard("tb").on_start(RUN)
    with raises(af.CompileError):
        TensorBoard().on_start(RUN)
    with raises(af.CompileError):
        WandB().on_start(RUN)
    with raises(af.CompileError):
        MLflow().on_start(RUN)
    with raises(af.CompileError):
        CSV("x.csv", every=0)


@pytest.mark.parametrize("has_ended", [True, False])
def test_wandb_gets_the_options_the_numbers_and_the_end(monkeypatch, has_ended):
    calls = []

    class Run:
        def log(self, data, step=None, commit=None):
            calls.append(("log", data, step))

        def define_metric(self, name, step_metric=None, step_sync=None, hidden=None, summary=None):
            calls.append(("define_metric", name, step_metric))

        def finish(self, exit_code=None):
            calls.append(("finish", exit_code))

    def init(entity=None, project=None, name=None, config=None, resume=None):
        calls.append(("init", project, name, config))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    log(WandB("p", name="n", config={"mine": 1}), steps=[1, 2], has_ended=has_ended)
    assert calls == [
        ("init", "p", "n", {"job": "train", "seed": 7, "mine": 1}),
        ("define_metric", "*", "step"),
        ("log", {"step": 1, "loss": 1.0, "accuracy": 1.0}, None),
        ("log", {"step": 2, "loss": 0.5, "accuracy": 2.0}, None),
        ("log", {"step": 2, "evaluation/loss": 1.0}, None),
        ("finish", 0 if has_ended else 1),
    ]


@pytest.mark.parametrize("known", [None, SimpleNamespace(experiment_id="3")])
def test_mlflow_gets_the_options_the_numbers_and_the_end(monkeypatch, known):
    calls = []

    class MlflowClient:
        def __init__(self, tracking_uri=None, registry_uri=None):
            calls.append(("client", tracking_uri))

        def get_experiment_by_name(self, name):
            return known

        def create_experiment(self, name, artifact_location=None, tags=None):
            return f"new {name}"

        def create_run(self, experiment_id, start_time=None, tags=None, run_name=None):
            calls.append(("run", experiment_id, run_name))
            return SimpleNamespace(info=SimpleNamespace(run_id="r"))

        def log_batch(self, run_id, metrics=(), params=(), tags=(), synchronous=None):
            calls.append((run_id, [(m[0], m[1], m[3]) for m in metrics], [*params]))

        def set_terminated(self, run_id, status=None, end_time=None):
            calls.append((run_id, status))

    entities = SimpleNamespace(
        Metric=lambda key, value, timestamp, step: (key, value, timestamp, step),
        Param=lambda key, value: (key, value),
    )
    package = ModuleType("mlflow")
    package.MlflowClient = MlflowClient
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    logger = MLflow("e", name="n", tracking_uri="u")
    log(logger, steps=[2], has_ended=known is None)
    assert calls == [
        ("client", "u"),
        ("run", "new e" if known is None else "3", "n"),
        ("r", [], [("job", "train"), ("seed", "7")]),
        ("r", [("loss", 0.5, 2), ("accuracy", 2.0, 2)], []),
        ("r", [("evaluation/loss", 1.0, 2)], []),
        ("r", "FINISHED" if known is None else "FAILED"),
    ]
    assert logger.run_id == "r"
