"""`af.eager`: a block in which tensors have values, and a function that is called so."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, overload

import numpy as np

import compiler.pipeline.standard_ops  # noqa: F401  # registers what ops are computed by
from actorflow.data import spec_of
from actorflow.eager_mode.eager_trace import Copies, EagerTrace, engine_of_thread
from actorflow.eager_mode.launches import Kernels
from actorflow.environment.default_seed import default_seed
from actorflow.environment.host import is_cuda
from actorflow.environment.settings import Settings, configure
from actorflow.nn.module import ByIdentity, Module, initialise
from actorflow.options.run_spec import check_function, check_model
from actorflow.tensor.tensor import Tensor
from actorflow.tensor.tracer import Trace, current_trace, find_source, recording
from actorflow.trace.job_graph import Batch
from compiler.contract.errors import CompileError, DeviceError
from compiler.contract.placement import HOST, Device, distinct_devices
from compiler.contract.types import DType, TensorType

Array = np.ndarray[Any, Any]

_COUNTER = TensorType(DType.INT64, ())


def open_trace(
    batch: Mapping[str, Array],
    model: Module | None,
    device: Device | None,
    *,
    deterministic: bool = False,
    **options: Any,
) -> EagerTrace:
    """Return a trace for this thread, on a device, by default on the one of ACTORFLOW_DEVICE.

    Raises CompileError where a job is being traced, and where the device is not here.
    """
    outer = current_trace()
    if outer is not None and not outer.is_eager:
        raise CompileError(
            f"{find_source()}: af.eager was called in a function that is traced, whose tensors"
            " have no data; call it outside of the job"
        )
    settings = Settings.from_env(os.environ)
    configure(settings.log_level)
    try:
        device = device or _only(settings.devices)
        engine = engine_of_thread(settings, device, deterministic=deterministic)
    except (CompileError, DeviceError) as error:
        raise CompileError(f"{find_source()}: af.eager: {error}") from error
    return EagerTrace(engine, batch, model, **options)


def _only(devices: Sequence[Device]) -> Device:
    """Return the GPU that a job would run on, or else the host, which acts simulated devices."""
    if len(devices) > 1:
        names = ", ".join(map(str, devices))
        raise CompileError(
            f"eager mode computes on one device, and ACTORFLOW_DEVICE names {names}; give"
            ' device="host", or another one'
        )
    return devices[0] if is_cuda(devices[0]) else HOST


def _parsed(name: str | None) -> Device | None:
    """Return the device that the user names. Raises CompileError."""
    if name is None:
        return None
    try:
        (device,) = distinct_devices([name])
    except ValueError as error:
        raise CompileError(f"{find_source()}: af.eager(device=...): {error}") from None
    if not (device == HOST or is_cuda(device)):
        raise CompileError(
            f"{find_source()}: af.eager(device={name!r}): expected the host or a GPU, such as"
            ' "cuda:0"; the host computes what a simulated device would'
        )
    return device


def counters(trace_of: Callable[[TensorType, Array], Any], seed: int, step: int) -> dict[str, Any]:
    """Return the variables that random numbers follow from."""
    numbers = {"seed": seed, "step": step, "batches": step}
    return {name: trace_of(_COUNTER, np.array(n, np.int64)) for name, n in numbers.items()}


class EagerBlock:
    """A block `with af.eager():`; see `eager`."""

    def __init__(self, *, train: bool, seed: int, device: Device | None) -> None:
        self._train, self._seed, self._device = train, seed, device
        self._open: list[AbstractContextManager[Trace]] = []

    def __enter__(self) -> None:
        trace = open_trace(
            {}, None, self._device, is_training=self._train, state={}, seed=self._seed, copies={}
        )
        trace.state |= counters(trace.builder.kernels.store, self._seed, 0)
        block = recording(trace)
        block.__enter__()
        self._open.append(block)

    def __exit__(self, *raised: Any) -> None:
        self._open.pop().__exit__(*raised)


class EagerFunction:
    """A function of (model, batch) that is called eagerly; see `eager`."""

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        *,
        train: bool,
        seed: int,
        device: Device | None,
    ) -> None:
        self.function = function
        self._train, self._seed, self._device = train, seed, device
        self._num_calls = 0
        # Of the kernels that were used last: another device has other memory.
        self._kernels: Kernels | None = None
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
            arrays,
            model,
            self._device,
            is_training=self._train,
            state={},
            seed=self._seed,
            copies=copies,
        )
        if self._kernels is not trace.builder.kernels:
            copies.clear()
            self._kernels = trace.builder.kernels
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
def eager(
    *, train: bool = True, seed: int | None = None, device: str | None = None
) -> EagerBlock: ...


@overload
def eager(
    function: Callable[[Any, Any], Any],
    *,
    train: bool = True,
    seed: int | None = None,
    device: str | None = None,
) -> EagerFunction: ...


def eager(
    function: Callable[[Any, Any], Any] | None = None,
    *,
    train: bool = True,
    seed: int | None = None,
    device: str | None = None,
) -> EagerBlock | EagerFunction:
    """Compute op by op, with values: a block, or a function of (model, batch) to be called.

        with af.eager():
            y = model(x)  # an array
            print(y.shape, y[0], float(y.mean()))

        loss = af.eager(train.function)(model, {"x": x})

    Tensors can be printed, indexed, compared, and decide an `if` or a `while`. Functions, layers
    and `af.grad` are those of jobs, and results are, bit by bit, those of a plan without fusion.
    A tensor keeps what its gradient needs as long as it lives; `x.detach()` does not.

    Args:
        function: what a job decorates, or nothing for a block.
        train: whether dropout and batch norm do what they do in training.
        seed: of random numbers, and of first values of the model; that of `af.seed` by default.
        device: "host" or a GPU such as "cuda:0", in whose memory values stay; by default the one of
            ACTORFLOW_DEVICE. Each launch on a GPU is waited for.

    Raises CompileError in a function that is traced, and for a device that is not here.
    """
    seed, on = default_seed() if seed is None else seed, _parsed(device)
    if function is None:
        return EagerBlock(train=train, seed=seed, device=on)
    check_function(function)
    return EagerFunction(function, train=train, seed=seed, device=on)
