"""`af.eager`: a block in which tensors have values, and a function that is called so."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, overload

import numpy as np

import compiler.pipeline.standard_ops  # noqa: F401  # registers what ops are computed by
from actorflow.data import spec_of
from actorflow.eager_mode.eager_trace import Copies, EagerTrace, engine_of_thread
from actorflow.environment.default_seed import default_seed
from actorflow.environment.settings import Settings, configure
from actorflow.nn.module import ByIdentity, Module, initialise
from actorflow.options.run_spec import check_function, check_model
from actorflow.tensor.tensor import Tensor
from actorflow.tensor.tracer import Trace, current_trace, find_source, recording
from actorflow.trace.job_graph import Batch
from compiler.contract.errors import CompileError
from compiler.contract.placement import DeviceKind
from compiler.contract.types import DType, TensorType

Array = np.ndarray[Any, Any]

_COUNTER = TensorType(DType.INT64, ())


def open_trace(
    batch: Mapping[str, Array],
    model: Module | None,
    *,
    deterministic: bool = False,
    **options: Any,
) -> EagerTrace:
    """Return a trace for this thread. Raises CompileError where a job is being traced."""
    outer = current_trace()
    if outer is not None and not outer.is_eager:
        raise CompileError(
            f"{find_source()}: af.eager was called in a function that is traced, whose tensors"
            " have no data; call it outside of the job"
        )
    settings = Settings.from_env(os.environ)
    configure(settings.log_level)
    if DeviceKind.CUDA in [device.kind for device in settings.devices]:
        raise CompileError(
            f"{find_source()}: eager mode computes on the host, and ACTORFLOW_DEVICE names"
            f" {', '.join(map(str, settings.devices))}; unset it, or run the function as a job"
        )
    engine = engine_of_thread(settings, deterministic=deterministic)
    return EagerTrace(engine, batch, model, **options)


def counters(trace_of: Callable[[TensorType, Array], Any], seed: int, step: int) -> dict[str, Any]:
    """Return the variables that random numbers follow from."""
    numbers = {"seed": seed, "step": step, "batches": step}
    return {name: trace_of(_COUNTER, np.array(n, np.int64)) for name, n in numbers.items()}


class EagerBlock:
    """A block `with af.eager():`; see `eager`."""

    def __init__(self, *, train: bool, seed: int) -> None:
        self._train, self._seed = train, seed
        self._open: list[AbstractContextManager[Trace]] = []

    def __enter__(self) -> None:
        trace = open_trace({}, None, is_training=self._train, state={}, seed=self._seed, copies={})
        trace.state |= counters(trace.builder.kernels.store, self._seed, 0)
        block = recording(trace)
        block.__enter__()
        self._open.append(block)

    def __exit__(self, *raised: Any) -> None:
        self._open.pop().__exit__(*raised)


class EagerFunction:
    """A function of (model, batch) that is called eagerly; see `eager`."""

    def __init__(self, function: Callable[[Any, Any], Any], *, train: bool, seed: int) -> None:
        self.function = function
        self._train, self._seed = train, seed
        self._num_calls = 0
        self._copies: ByIdentity[Copies] = ByIdentity()

    def __call__(self, model: Module, batch: Mapping[str, Array]) -> Any:
        """Return what the function returns; each call is a step, for random numbers.

        Raises CompileError with the user's line.
        """
        check_model(model)
        arrays = arrays_of(batch)
        spec_of(arrays, f"{find_source()}: an eager call")
        copies = self._copies.get(model)
        copies = self._copies.set(model, {}) if copies is None else copies
        trace = open_trace(
            arrays, model, is_training=self._train, state={}, seed=self._seed, copies=copies
        )
        initialise(model, self._seed)
        trace.state |= counters(trace.builder.kernels.store, self._seed, self._num_calls)
        with recording(trace):
            returned = self.function(model, Batch(trace))
        self._num_calls += 1
        return returned


def arrays_of(batch: Any) -> dict[str, Array]:
    """Return the entries of a batch; eager tensors as arrays."""
    if not isinstance(batch, Mapping):
        raise CompileError(
            f"{find_source()}: a batch is a mapping of arrays by name, got {type(batch).__name__}"
        )
    return {k: np.asarray(x) if isinstance(x, Tensor) else x for k, x in batch.items()}


@overload
def eager(*, train: bool = True, seed: int | None = None) -> EagerBlock: ...


@overload
def eager(
    function: Callable[[Any, Any], Any], *, train: bool = True, seed: int | None = None
) -> EagerFunction: ...


def eager(
    function: Callable[[Any, Any], Any] | None = None,
    *,
    train: bool = True,
    seed: int | None = None,
) -> EagerBlock | EagerFunction:
    """Compute op by op, with values: a block, or a function of (model, batch) to be called.

        with af.eager():
            y = model(af.as_tensor(x))
            print(y.shape, y[0], float(y.mean()))

        loss = af.eager(train.function)(model, {"x": x})

    Tensors can be printed, indexed, compared, and decide an `if` or a `while`. Functions, layers
    and `af.grad` are those of jobs, and results are, bit by bit, those of a plan without fusion.
    A tensor keeps what its gradient needs as long as it lives; `x.detach()` does not.

    Args:
        function: what a job decorates, or nothing for a block.
        train: whether dropout and batch norm do what they do in training.
        seed: of random numbers, and of first values of the model; that of `af.seed` by default.

    Raises CompileError in a function that is traced.
    """
    seed = default_seed() if seed is None else seed
    if function is None:
        return EagerBlock(train=train, seed=seed)
    check_function(function)
    return EagerFunction(function, train=train, seed=seed)
