"""Callbacks: what hears of a run while it goes on, and may end it.

    train.fit(model, data, steps=1000, callbacks=[af.callbacks.EarlyStopping("loss")])

A callback is any object with one of the methods `on_start`, `on_step`, `on_evaluation`, `on_end`,
and perhaps `close`; docs/callbacks.md says which thread calls each, and what waits for it.

protocol.py       the methods; `StartedRun`, what a callback is told at the start; `StopTraining`
monitors.py       early stopping, pruning, a time limit, learning rate, gradient norms
loggers.py        a table, TensorBoard, W&B, MLflow
samples.py        `ReportSamples`: rows as images and texts, in the folder of a run
learning_rate.py  `LearningRateFinder`: a short run in which the rate grows
summary.py        `ModelSummary`: a table of the modules

May import actorflow.{checkpoint, environment, functional, nn, tensor}, compiler.contract,
compiler.graph and memory. The packages of loggers are imported here alone, late. Begin reading at
protocol.py.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from actorflow.callbacks.protocol import Callback as Callback
from actorflow.callbacks.protocol import StartedRun as StartedRun

if TYPE_CHECKING:
    from actorflow.callbacks.learning_rate import LearningRateFinder as LearningRateFinder
    from actorflow.callbacks.loggers import CSV as CSV
    from actorflow.callbacks.loggers import MLflow as MLflow
    from actorflow.callbacks.loggers import TensorBoard as TensorBoard
    from actorflow.callbacks.loggers import WandB as WandB
    from actorflow.callbacks.monitors import EarlyStopping as EarlyStopping
    from actorflow.callbacks.monitors import GradientNorms as GradientNorms
    from actorflow.callbacks.monitors import LearningRate as LearningRate
    from actorflow.callbacks.monitors import Pruning as Pruning
    from actorflow.callbacks.monitors import Timer as Timer
    from actorflow.callbacks.samples import ReportSamples as ReportSamples
    from actorflow.callbacks.summary import ModelSummary as ModelSummary

_MONITORS = ("EarlyStopping", "GradientNorms", "LearningRate", "Pruning", "Timer")
_LATE = {
    "LearningRateFinder": "learning_rate",
    "ModelSummary": "summary",
    "ReportSamples": "samples",
    **dict.fromkeys(("CSV", "MLflow", "TensorBoard", "WandB"), "loggers"),
    **dict.fromkeys(_MONITORS, "monitors"),
}
"""Names whose modules most runs do without."""

if not TYPE_CHECKING:  # which would take any attribute for one that is there

    def __getattr__(name: str) -> Any:
        """Hand on a name of `_LATE`, when it is first asked for."""
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
        value = getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
        globals()[name] = value
        return value

    __all__ = [
        "CSV", "Callback", "EarlyStopping", "GradientNorms", "LearningRate", "LearningRateFinder",
        "MLflow", "ModelSummary", "Pruning", "ReportSamples", "StartedRun", "TensorBoard",
        "Timer", "WandB",
    ]  # fmt: skip

    def __dir__() -> list[str]:
        """Return the public names, those that are loaded late among them."""
        return list(__all__)
