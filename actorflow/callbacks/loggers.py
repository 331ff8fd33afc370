"""Callbacks that write the numbers of a run elsewhere: a table, TensorBoard, W&B, MLflow.

All get the scalars of each step, or of one in `every`, and the means of evaluations as
`evaluation/<name>`. No step waits for them. Steps and evaluations come on two threads, so a mean
may be written before the numbers of earlier steps: each carries its step. Of several ranks the
first one writes. Packages are imported when a run starts, and are the user's to install.
"""

from __future__ import annotations

import csv
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from actorflow.callbacks.protocol import EVALUATION, Metrics, Results, StartedRun
from actorflow.tensor.literals import checked_size
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.contract.files import user_path

Write = Callable[[int, Mapping[str, float]], object]
"""Takes a step and its numbers."""

Close = Callable[[bool], object]
"""Closes the place; is told whether the run ended in order."""


def _imported(module: str, mend: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        text = f"{find_source()}: {module} cannot be imported ({error}); {mend}"
        raise CompileError(text) from error


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(v) for name, v in values.items() if isinstance(v, (int, float))}


class Logger(ABC):
    """What loggers have in common. A subclass opens the place that it writes to.

    Args:
        every: steps between two that are written.

    Raises CompileError with the user's line.
    """

    is_waited_for = False

    def __init__(self, every: int) -> None:
        self._every = checked_size(every, "every of a logger")
        if self._every < 1:
            raise CompileError(f"{find_source()}: every of a logger must be 1 or more, got {every}")
        self._write: Write = lambda step, values: None
        self._finish: Close = lambda has_ended: None
        self._has_ended = False

    @abstractmethod
    def _open(self, run: StartedRun) -> tuple[Write, Close]:
        """Open the place; return what writes to it, and what closes it."""

    def on_start(self, run: StartedRun) -> None:
        """Open the place. Raises CompileError where that cannot be."""
        self._has_ended = False
        self._write, self._finish = self._open(run)

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Write the scalars of a step that is due."""
        if step % self._every == 0:
            self._write(step, _numbers(metrics))

    def on_evaluation(self, step: int, means: Results) -> None:
        """Write the means of an evaluation."""
        self._write(step, {f"{EVALUATION}{n}": mean for n, mean in _numbers(means).items()})

    def on_end(self, result: object) -> None:
        """Note that the run ended in order."""
        self._has_ended = True

    def close(self) -> None:
        """Close the place."""
        finish, self._finish = self._finish, lambda has_ended: None
        finish(self._has_ended)


class CSV(Logger):
    """Writes a table: `step`, the scalar outputs, and the means of evaluations.

    A row is one step, or one evaluation; other cells are empty. A run that resumes goes on with the
    table: rows after its first step are dropped, for it makes those steps again. A run that begins
    at step 0 begins a new table.

    Args:
        path: of the file, whose folder is made.
        every: steps between two rows.
    """

    def __init__(self, path: str | os.PathLike[str], *, every: int = 1) -> None:
        super().__init__(every)
        self._path = Path(user_path(path))

    def _open(self, run: StartedRun) -> tuple[Write, Close]:
        columns = ["step", *run.outputs, *[f"{EVALUATION}{name}" for name in run.evaluated]]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rows: list[list[str]] = []
        if run.first_step and self._path.exists():
            with self._path.open(newline="") as before:
                head, *rows = [*csv.reader(before)] or [columns]
            if sorted(head) != sorted(columns):
                raise CompileError(
                    f"{find_source()}: {self._path} has the columns {', '.join(head)}, and this run"
                    f" writes {', '.join(columns)}; give CSV another path"
                )
            columns = head  # on another number of ranks outputs may have another order
        # A kill may have cut the last line.
        whole = [row for row in rows if len(row) == len(columns) and row[0].isdigit()]
        kept = [row for row in whole if int(row[0]) <= run.first_step]
        draft = self._path.with_name(f".{self._path.name}.new")
        with draft.open("w", newline="") as new:
            csv.writer(new).writerows([columns, *kept])
        draft.replace(self._path)
        # Line by line, so that a killed run loses none.
        file = self._path.open("a", newline="", buffering=1)
        writer = csv.writer(file)

        def write(step: int, values: Mapping[str, float]) -> None:
            row = {"step": step, **values}
            writer.writerow([row.get(name, "") for name in columns])

        return write, lambda has_ended: file.close()


class TensorBoard(Logger):
    """Writes scalars for TensorBoard, by its own writer; needs the extra [tb].

    Args:
        folder: of the event files; None is `tensorboard` in the directory of the run.
        every: steps between two that are written.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, *, every: int = 1) -> None:
        super().__init__(every)
        self._folder = None if folder is None else Path(user_path(folder))

    def _open(self, run: StartedRun) -> tuple[Write, Close]:
        folder = self._folder
        if folder is None and run.directory is not None:
            folder = run.directory / "tensorboard"
        if folder is None:
            raise CompileError(
                f"{find_source()}: TensorBoard needs a folder where fit has no checkpoint=; give"
                " TensorBoard('runs/tb')"
            )
        summary = _imported("tensorboard.summary", "pip install 'actorflow[tb]'")
        writer = summary.Writer(str(folder))

        def write(step: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        return write, lambda has_ended: writer.close()


class WandB(Logger):
    """Writes to Weights & Biases; needs the package wandb.

    The axis of all charts is `step`, whatever order numbers come in.

    Args:
        project: of the run.
        every: steps between two that are written.
        more: further arguments of `wandb.init`, such as name=, id= and resume="allow".
    """

    def __init__(self, project: str | None = None, *, every: int = 1, **more: Any) -> None:
        super().__init__(every)
        self._config = {"project": project, **more}

    def _open(self, run: StartedRun) -> tuple[Write, Close]:
        wandb = _imported("wandb", "pip install wandb")
        config = {"job": run.job, **run.options, **self._config.get("config", {})}
        began = wandb.init(**(self._config | {"config": config}))
        # A step of W&B itself never goes back.
        began.define_metric("*", step_metric="step")
        return (
            lambda step, values: began.log({"step": step, **values}),
            lambda has_ended: began.finish(exit_code=0 if has_ended else 1),
        )


class MLflow(Logger):
    """Writes to MLflow, by its client; needs the package mlflow or mlflow-skinny.

    Args:
        experiment: its name; it is made where there is none.
        name: of the run.
        tracking_uri: of the server or folder; None for what MLflow is set up for.
        run_id: of a run that is gone on with; None for a new one.
        every: steps between two that are written.
    """

    def __init__(
        self,
        experiment: str = "Default",
        *,
        name: str | None = None,
        tracking_uri: str | None = None,
        run_id: str | None = None,
        every: int = 1,
    ) -> None:
        super().__init__(every)
        self._experiment, self._name, self._tracking_uri = experiment, name, tracking_uri
        self.run_id = run_id

    def _open(self, run: StartedRun) -> tuple[Write, Close]:
        mlflow = _imported("mlflow", "pip install mlflow-skinny")
        entities = _imported("mlflow.entities", "pip install mlflow-skinny")
        # A client, for the run that MLflow calls active is one of this thread alone.
        client = mlflow.MlflowClient(self._tracking_uri)
        if self.run_id is None:
            known = client.get_experiment_by_name(self._experiment)
            place = (known and known.experiment_id) or client.create_experiment(self._experiment)
            self.run_id = client.create_run(place, run_name=self._name).info.run_id
            options = {"job": run.job, **run.options}
            params = [entities.Param(name, str(v)[:250]) for name, v in options.items()]
            client.log_batch(self.run_id, params=params)

        def write(step: int, values: Mapping[str, float]) -> None:
            now_ms = time.time_ns() // 1_000_000
            metrics = [entities.Metric(name, v, now_ms, step) for name, v in values.items()]
            client.log_batch(self.run_id, metrics=metrics)

        def finish(has_ended: bool) -> None:
            client.set_terminated(self.run_id, "FINISHED" if has_ended else "FAILED")

        return write, finish
