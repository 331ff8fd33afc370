"""actorflow: an actor-based dataflow execution engine for training deep networks.

    import actorflow as af
    from actorflow import nn

A function decorated with `@af.job` is traced once, compiled into a static plan of actors, and run
from preallocated memory.

af.job, af.Job              the decorator, and what it returns: fit, stream, step, compile
af.nn, af.optim, af.data    layers; optimizers and schedules; sources of batches
af.relu, af.where, ...      functions on tensors, with torch's names (`actorflow.functional`)
af.linalg, af.fft           linear algebra and Fourier transforms
af.onnx                     models of ONNX, read and written
af.load, af.seed             weights of a file or run; the seed of what is given none
af.Mesh, af.split, af.stage, af.device  how tensors and ops lie on ranks and devices
af.op, af.numpy_op, af.kernel, af.graph_pass  ops, kernels and passes of your own

Below this file, and importing only to the right: cli, onnx, jobs, run, distributed, compile and
trace, options, nn and optim, functional, tensor; environment, data and checkpoint import none of
these. Begin reading at `jobs/job.py`, which traces, compiles and runs; see README.md, and
docs/tour.md, which follows one tensor through the engine.
"""

from actorflow.top_level import check_top_level_packages, keep_library_module

check_top_level_packages()
keep_library_module()

from typing import TYPE_CHECKING, Any  # noqa: E402

from actorflow import data, nn, optim  # noqa: E402  # after check_top_level_packages: see top_level.py
from actorflow.checkpoint.errors import CheckpointError  # noqa: E402
from actorflow.compile.own_ops import numpy_op, op  # noqa: E402
from actorflow.data import DataError, DataSource  # noqa: E402
from actorflow.environment.default_seed import seed  # noqa: E402
from actorflow.environment.settings import __version__ as __version__  # noqa: E402
from actorflow.functional import *  # noqa: E402  # its own __all__ says what
from actorflow.functional import __all__ as _functions  # noqa: E402
from actorflow.functional import debug, fft, linalg  # noqa: E402
from actorflow.jobs.capture import capture, patch  # noqa: E402
from actorflow.jobs.job import Job, job  # noqa: E402
from actorflow.options.job_options import LossScale  # noqa: E402
from actorflow.options.run_spec import (  # noqa: E402
    Evaluation,
    StopTraining,
)
from actorflow.tensor.layouts import (  # noqa: E402
    Mesh,
    broadcast,
    device,
    partial,
    precision,
    stage,
)
from actorflow.tensor.tensor import (  # noqa: E402
    PACKAGE_HINTS,
    Tensor,
    unsupported_attribute,
)
from actorflow.trace.job_graph import grad  # noqa: E402
from actors.machine.errors import ActorFailed, ForkedRun  # noqa: E402
from compiler.contract.errors import (  # noqa: E402
    ActorflowError,
    BudgetError,
    CompileError,
    DeviceError,
    InternalError,
    OutOfMemory,
    PlanFormatError,
)
from compiler.contract.plan import Plan  # noqa: E402
from compiler.contract.types import DType, TensorType  # noqa: E402

if TYPE_CHECKING:
    from actorflow import onnx
    from actorflow.checkpoint.weights import load
    from actorflow.compile.extensions import graph_pass, kernel
    from actorflow.eager_mode.region import eager
    from actorflow.run.fitting import FitResult, Stopped
    from actorflow.run.runner import Runner

_LATE = {
    "eager": "actorflow.eager_mode.region",
    "graph_pass": "actorflow.compile.extensions",
    "kernel": "actorflow.compile.extensions",
    "load": "actorflow.checkpoint.weights",
    "FitResult": "actorflow.run.fitting",
    "NonFiniteLoss": "actorflow.run.broken_steps",
    "Runner": "actorflow.run.runner",
    "Stopped": "actorflow.run.fitting",
}
"""Names whose modules load the kernels and the machine, a third of the time of this import."""

_LATE_ROOMS = ("onnx",)


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


def __dir__() -> list[str]:
    """Return the public names, those that are loaded late among them."""
    return [*__all__, "__version__"]


__all__ = [
    "ActorFailed",
    "ActorflowError",
    "BudgetError",
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
    "LossScale",
    "Mesh",
    "NonFiniteLoss",
    "OutOfMemory",
    "Plan",
    "PlanFormatError",
    "Runner",
    "StopTraining",
    "Stopped",
    "Tensor",
    "TensorType",
    "broadcast",
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
    "nn",
    "numpy_op",
    "onnx",
    "op",
    "optim",
    "partial",
    "patch",
    "precision",
    "seed",
    "stage",
    *_functions,
]
