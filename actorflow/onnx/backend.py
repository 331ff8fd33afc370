"""actorflow as a backend of ONNX (`onnx.backend.base.Backend`): a model on numpy arrays.

    import actorflow.onnx.backend as backend

    y, = backend.run_model(model, [x])

A plan is static, so a model is compiled at its first run for the types of its inputs, and again
where an input that decides a shape has other values. What is not known raises
`BackendIsNotSupposedToImplementIt`, which the test suite of ONNX counts as skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx.backend.base import Backend, BackendRep
from onnx.backend.test.runner import BackendIsNotSupposedToImplementIt

from actorflow.jobs.job import Job
from actorflow.nn.module import Module
from actorflow.onnx import reading
from actorflow.onnx.module import Execution, needed_as_constants
from actorflow.onnx.program import OnnxError, OnnxGraph
from actorflow.options.job_options import JobOptions
from actorflow.tensor.tensor import as_tensor

Array = np.ndarray[Any, Any]

_DEVICES = {"CPU": None}


class ActorflowRep(BackendRep):  # type: ignore[misc]  # Any, with the extra and without
    """A model that is ready to run; plans are kept by the types of inputs."""

    def __init__(self, block: OnnxGraph, most: int) -> None:
        self._block = block
        self._most = most
        self._known = needed_as_constants(block)
        self._rounded = {port.name for port in block.outputs if port.dtype == "bfloat16"}
        self._prepared: dict[Any, tuple[Job, _Nothing, dict[str, str]]] = {}

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Array, ...]:
        """Return the outputs for inputs in order, or by name."""
        ports = self._block.inputs
        if not isinstance(inputs, Mapping):
            inputs = dict(zip([port.name for port in ports], inputs, strict=False))
        arrays = {name: _plain(value) for name, value in inputs.items()}
        known = {name: array for name, array in arrays.items() if name in self._known}
        batch = {name: array for name, array in arrays.items() if name not in known}
        batch = batch or {"": np.zeros(1, np.float32)}  # a job reads a batch
        types = tuple([(name, str(a.dtype), a.shape) for name, a in batch.items()])
        values = tuple([(name, str(a.dtype), a.shape, a.tobytes()) for name, a in known.items()])
        with _refusals():
            if (types, values) not in self._prepared:
                self._prepared[types, values] = self._job(known, [*batch])
            job, model, dtypes = self._prepared[types, values]
            made = job.step(model, batch)
        return tuple(
            [
                self._result(port.name, made[str(place)], dtypes)
                for place, port in enumerate(self._block.outputs)
            ]
        )

    def _result(self, name: str, value: Any, dtypes: Mapping[str, str]) -> Array:
        array = np.asarray(value, dtypes[name])  # a scalar comes as a number of Python
        return array.astype(_bfloat16()) if name in self._rounded else array

    def _job(self, known: Mapping[str, Array], names: Sequence[str]) -> tuple[Any, ...]:
        block, rounded, most = self._block, self._rounded, self._most
        if len(block.steps) > 1 and any(
            p.dtype == "bfloat16" for p in (*block.inputs, *block.outputs)
        ):
            raise OnnxError(
                "a graph of several nodes in bfloat16 rounds between them, which no op does"
            )
        dtypes: dict[str, str] = {}

        def onnx(model: Module, batch: Any) -> dict[str, Any]:
            tensors = {name: batch[name] for name in names if name}
            made = Execution(most, rounded).run(block, {**known, **tensors})
            results = [as_tensor(value) for value in made]
            for port, tensor in zip(block.outputs, results, strict=True):
                dtypes[port.name] = tensor.dtype.value
            return {str(place): tensor for place, tensor in enumerate(results)}

        return Job(onnx, JobOptions(train=False)), _Nothing(), dtypes


class _Nothing(Module):
    """A model without parameters: initialisers of a backend's model are constants."""


def _bfloat16() -> Any:
    import ml_dtypes  # a requirement of the onnx package

    return ml_dtypes.bfloat16


def _plain(value: Any) -> Array:
    """Return an input as an array; of bfloat16, which no batch has, as float32, which is exact."""
    if type(value).__name__ == "TensorProto":
        value = reading.onnx_package().numpy_helper.to_array(value)
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype == _bfloat16() else array


class _refusals:  # noqa: N801  # reads as a function
    """Turn an error that names what is not known into what ONNX's suite counts as skipped."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OnnxError):
            raise BackendIsNotSupposedToImplementIt(str(error)) from error


class ActorflowBackend(Backend):  # type: ignore[misc]  # Any, with the extra and without
    """The class behind the functions of this module."""

    @classmethod
    def is_compatible(cls, model: Any, device: str = "CPU", **kwargs: Any) -> bool:
        """Whether all operators of a model are known."""
        try:
            cls.prepare(model, device)
        except BackendIsNotSupposedToImplementIt:
            return False
        return True

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **kwargs: Any) -> ActorflowRep:
        """Return a model that can be run. Raises `BackendIsNotSupposedToImplementIt`."""
        with _refusals():
            if not cls.supports_device(device):
                raise OnnxError(f"the backend runs on {', '.join(_DEVICES)}, got {device!r}")
            block, most = reading.read(model)
            return ActorflowRep(block, most)
        raise AssertionError  # what is above returns or raises

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether models run on a device: "CPU", or "CPU:0"."""
        return device.split(":")[0] in _DEVICES


is_compatible = ActorflowBackend.is_compatible
prepare = ActorflowBackend.prepare
run_model = ActorflowBackend.run_model
run_node = ActorflowBackend.run_node
supports_device = ActorflowBackend.supports_device
