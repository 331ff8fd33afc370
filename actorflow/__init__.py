"""actorflow: an actor-based dataflow execution engine for training deep networks.

    import actorflow as af
    from actorflow import nn

A function decorated with `@af.job` is traced once, compiled into a static plan of actors, and run
from preallocated memory.

af.job, af.Job              the decorator, and what it returns: fit, stream, step, compile
af.nn, af.optim, af.data    layers; optimizers and schedules; sources of batches
af.metrics                  metrics of whole sets, which a job returns
af.callbacks                what hears of a run, and may end it
af.relu, af.where, ...      functions on tensors, with torch's names (`actorflow.functional`)
af.linalg, af.fft           linear algebra and Fourier transforms
af.onnx                     models of ONNX, read and written
af.load, af.seed            weights of a file or run; the seed of what is given none
af.Mesh, af.split, af.stage, af.device  how tensors and ops lie on ranks and devices
af.op, af.numpy_op, af.kernel, af.graph_pass  ops, kernels and passes of your own

Below this file, and importing only to the right: cli, onnx, jobs, run, distributed, compile and
trace, options, callbacks, nn, optim and metrics, functional, tensor; environment, data and
checkpoint import none of these. Begin reading at `jobs/job.py`, which traces, compiles and runs;
see README.md, and docs/tour.md, which follows one tensor through the engine.
"""

from actorflow.top_level import check_system, check_top_level_packages, keep_library_module

check_system()
check_top_level_packages()
keep_library_module()

from typing import TYPE_CHECKING, Any  # noqa: E402

from actorflow import callbacks as callbacks  # noqa: E402  # after check_top_level_packages
from actorflow import data as data  # noqa: E402  # after check_top_level_packages: see top_level.py
from actorflow import functional  # noqa: E402
from actorflow import metrics as metrics  # noqa: E402
from actorflow import nn as nn  # noqa: E402
from actorflow import optim as optim  # noqa: E402
from actorflow.callbacks.protocol import StopTraining as StopTraining  # noqa: E402
from actorflow.checkpoint.errors import CheckpointError as CheckpointError  # noqa: E402
from actorflow.compile.own_ops import numpy_op as numpy_op  # noqa: E402
from actorflow.compile.own_ops import op as op  # noqa: E402
from actorflow.data import DataError as DataError  # noqa: E402
from actorflow.data import DataSource as DataSource  # noqa: E402
from actorflow.environment.default_seed import seed as seed  # noqa: E402
from actorflow.environment.default_seed import seed_everything as seed_everything  # noqa: E402
from actorflow.environment.settings import SettingsError as SettingsError  # noqa: E402
from actorflow.environment.settings import __version__ as __version__  # noqa: E402
from actorflow.functional import *  # noqa: E402  # its own __all__ says what
from actorflow.functional import debug as debug  # noqa: E402
from actorflow.functional import fft as fft  # noqa: E402
from actorflow.functional import linalg as linalg  # noqa: E402
from actorflow.jobs.capture import capture as capture  # noqa: E402
from actorflow.jobs.capture import patch as patch  # noqa: E402
from actorflow.jobs.decorator import job as job  # noqa: E402
from actorflow.jobs.job import Job as Job  # noqa: E402
from actorflow.options.job_options import LossScale as LossScale  # noqa: E402
from actorflow.options.keep import Keep as Keep  # noqa: E402
from actorflow.options.run_spec import Evaluation as Evaluation  # noqa: E402
from actorflow.run.shown_errors import show_user_frames  # noqa: E402
from actorflow.tensor.layouts import Mesh as Mesh  # noqa: E402
from actorflow.tensor.layouts import broadcast as broadcast  # noqa: E402
from actorflow.tensor.layouts import device as device  # noqa: E402
from actorflow.tensor.layouts import partial as partial  # noqa: E402
from actorflow.tensor.layouts import precision as precision  # noqa: E402
from actorflow.tensor.layouts import stage as stage  # noqa: E402
from actorflow.tensor.probes import CheckFailed as CheckFailed  # noqa: E402
from actorflow.tensor.tensor import PACKAGE_HINTS as PACKAGE_HINTS  # noqa: E402
from actorflow.tensor.tensor import Tensor as Tensor  # noqa: E402
from actorflow.tensor.tensor import unsupported_attribute as unsupported_attribute  # noqa: E402
from actorflow.trace.job_graph import Batch as Batch  # noqa: E402
from actorflow.trace.job_graph import grad as grad  # noqa: E402
from actors.machine.errors import ActorFailed as ActorFailed  # noqa: E402
from actors.machine.errors import ForkedRun as ForkedRun  # noqa: E402
from compiler.contract.errors import ActorflowError as ActorflowError  # noqa: E402
from compiler.contract.errors import BudgetError as BudgetError  # noqa: E402
from compiler.contract.errors import CompileError as CompileError  # noqa: E402
from compiler.contract.errors import DeviceError as DeviceError  # noqa: E402
from compiler.contract.errors import InternalError as InternalError  # noqa: E402
from compiler.contract.errors import OutOfMemory as OutOfMemory  # noqa: E402
from compiler.contract.errors import PeerFailed as PeerFailed  # noqa: E402
from compiler.contract.errors import PlanFormatError as PlanFormatError  # noqa: E402
from compiler.contract.types import DType as DType  # noqa: E402
from compiler.contract.types import TensorType as TensorType  # noqa: E402

show_user_frames()

for _error in [*globals().values()]:
    # Shown, pickled and documented by the name that a user catches it by.
    if isinstance(_error, type) and issubclass(_error, Exception):
        _error.__module__ = __name__

if TYPE_CHECKING:  # redundant aliases are exports, for checkers that are strict about it
    from actorflow import onnx as onnx
    from actorflow.checkpoint.weights import load as load
    from actorflow.compile.extensions import graph_pass as graph_pass
    from actorflow.compile.extensions import kernel as kernel
    from actorflow.eager_mode.region import eager as eager
    from actorflow.run.broken_steps import NonFiniteLoss as NonFiniteLoss
    from actorflow.run.fitting import FitResult as FitResult
    from actorflow.run.fitting import Stopped as Stopped
    from actorflow.run.runner import Runner as Runner
    from compiler.contract.plan import Plan as Plan

_LATE = {
    "eager": "actorflow.eager_mode.region",
    "graph_pass": "actorflow.compile.extensions",
    "kernel": "actorflow.compile.extensions",
    "load": "actorflow.checkpoint.weights",
    "FitResult": "actorflow.run.fitting",
    "NonFiniteLoss": "actorflow.run.broken_steps",
    "Plan": "compiler.contract.plan",
    "Runner": "actorflow.run.runner",
    "Stopped": "actorflow.run.fitting",
}
"""Names whose modules, and what these load, would take a third of the time of this import."""

_LATE_ROOMS = ("onnx",)


if not TYPE_CHECKING:  # a checker would take any name for one that is there

    def __getattr__(name: str) -> Any:
        """Hand on a name of `_LATE`, or a room of `_LATE_ROOMS`, when it is first asked for."""
        if name in _LATE_ROOMS:
            from importlib import import_module

            return import_module(f"{__name__}.{name}")
        if name not in _LATE:
            raise unsupported_attribute(f"module {__name__!r}", name, PACKAGE_HINTS)
        from importlib import import_module

        value = globals()[name] = getattr(import_module(_LATE[name]), name)
        return value


if not TYPE_CHECKING:  # which reads no list that is put together, and would hide the functions
    __all__ = [
        "ActorFailed",
        "ActorflowError",
        "Batch",
        "BudgetError",
        "CheckFailed",
        "CheckpointError",
        "CompileError",
        "DType",
        "DataError",
        "DataSource",
        "DeviceError",
        "Evaluation",
        "FitResult",
        "ForkedRun",
        "InternalError",
        "Job",
        "Keep",
        "LossScale",
        "Mesh",
        "NonFiniteLoss",
        "OutOfMemory",
        "PeerFailed",
        "Plan",
        "PlanFormatError",
        "Runner",
        "SettingsError",
        "StopTraining",
        "Stopped",
        "Tensor",
        "TensorType",
        "broadcast",
        "callbacks",
        "capture",
        "data",
        "debug",
        "device",
        "eager",
        "fft",
        "grad",
        "graph_pass",
        "job",
        "kernel",
        "linalg",
        "load",
        "metrics",
        "nn",
        "numpy_op",
        "onnx",
        "op",
        "optim",
        "partial",
        "patch",
        "precision",
        "seed",
        "seed_everything",
        "stage",
        *functional.__all__,
    ]

    def __dir__() -> list[str]:
        """Return the public names, those that are loaded late among them."""
        return [*__all__, "__version__"]
