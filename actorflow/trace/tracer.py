"""Tracing: run the user's function once with symbolic tensors and record the logical graph.

A `Trace` is the context in which symbolic tensors live. It knows the model's parameter names, the
batch's types and whether the job trains; it gives every node the user's own line and the module
path. When the function returns, the trace is closed, and a tensor that escaped from it says so when
it is used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from actorflow.trace.code import OURS, WINGS, is_pythons
from compiler.attrs import Attrs, PlainValue
from compiler.errors import CompileError
from compiler.graph import UNPLACED, UNSTAGED, GraphBuilder, SourceLocation
from compiler.mesh import Mesh
from compiler.ops.sources import INPUT, VARIABLE
from compiler.placement import HOST, Device
from compiler.registry import Op
from compiler.types import TensorType, ValueId

InitSpec = tuple[tuple[str, PlainValue], ...]
"""How a variable gets its first value: ("kind", ...) and its parameters."""

Constraint = tuple[tuple[str, str], ...]
"""How a value must lie on the ranks: axes of the mesh, outermost first, and words as texts."""


def find_source() -> SourceLocation:
    """Return the innermost line of the calling stack that is the user's: not ours, not Python's.

    Python's own stands between where a context or a thread of ours runs what the user asked for.
    """
    return _location(_users_frame())


def users_line() -> str:
    """Return the line of `find_source` as a text; "" on a thread that no code of the user is on."""
    frame = _users_frame()
    return "" if _is_between(frame) else str(_location(frame))


def _users_frame() -> FrameType:
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_between(frame):
        frame = frame.f_back
    return frame


def _location(frame: FrameType) -> SourceLocation:
    return SourceLocation(
        shown_path(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_name
    )


def source_of(function: object) -> SourceLocation:
    """Return where the user defined a function, or the user's line for what has no code."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or code.co_filename.startswith(OURS):
        return find_source()
    return SourceLocation(shown_path(code.co_filename), code.co_firstlineno, code.co_name)


def _is_between(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file.startswith(OURS):
        return True
    module = str(frame.f_globals.get("__name__"))
    if file == "<string>":  # the __init__ that a dataclass of ours was given
        return module.split(".")[0] in WINGS
    return is_pythons(file, module)


def shown_path(filename: str) -> str:
    """Return a file as messages name it: relative to the working directory where it is in it.

    Bytes of its name that are no text, which Python has as surrogates, are shown as "?": plans and
    messages to other processes are UTF-8.
    """
    here = os.getcwd() + os.sep
    return filename.removeprefix(here).encode("utf-8", "replace").decode()


@dataclass(frozen=True, slots=True)
class Assigned:
    """The value that a variable was given last, and where in the user's program."""

    variable: ValueId
    value: ValueId
    scope: str
    source: SourceLocation


class Trace:
    """One run of a job's function with symbolic tensors.

    Args:
        batch_spec: type of every array of a batch by key.
        stored_names: path of every parameter and buffer by its `id`.
        module_paths: path of every module by `id(module)`.
        is_training: False for jobs that only evaluate; dropout is the identity then.
        batches_per_step: batches whose gradients are summed before an update.
        devices: of the job, in order.
        mesh: of the job's ranks; None for one.
    """

    def __init__(
        self,
        batch_spec: Mapping[str, TensorType],
        stored_names: Mapping[int, str],
        module_paths: Mapping[int, str],
        *,
        is_training: bool,
        batches_per_step: int = 1,
        devices: tuple[Device, ...] = (HOST,),
        mesh: Mesh | None = None,
    ) -> None:
        self.builder = GraphBuilder()
        self.devices = devices
        self.mesh = mesh
        self.names_devices = False
        self.regions = [0 if len(devices) == 1 else UNPLACED]
        self.stages = [UNSTAGED]
        self.batches_per_step = batches_per_step
        self.is_training = is_training
        self.is_open = True
        self.source = find_source()
        self._batch_spec = dict(batch_spec)
        self._stored_names = stored_names
        self.assigned: dict[str, Assigned] = {}
        self._module_paths = module_paths
        self._scope = ""
        self._inputs: dict[str, ValueId] = {}
        self._variables: dict[str, ValueId] = {}
        self._num_random = 0

    def emit(self, op: Op, inputs: list[ValueId], attrs: Attrs) -> tuple[ValueId, ...]:
        """Append a node at the user's current line. Raises CompileError naming that line.

        It is on the device and the stage of the innermost regions; see `actorflow.trace.devices`
        and `actorflow.trace.stages`.
        """
        device, stage = self.regions[-1], self.stages[-1]
        with self.builder.at(self._scope, find_source(), device=device, stage=stage):
            return self.builder.emit(op, inputs, attrs)

    def inside(self, module: object) -> AbstractContextManager[None]:
        """Give nodes the path of `module` while its `__call__` runs."""
        return self.scope(self._module_paths.get(id(module), self._scope))

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Give nodes the scope `name`."""
        saved, self._scope = self._scope, name
        try:
            yield
        finally:
            self._scope = saved

    def batch_input(self, key: str) -> ValueId:
        """Return the value of `batch[key]`. Raises CompileError naming the keys there are."""
        if key not in self._inputs:
            if key not in self._batch_spec:
                keys = ", ".join(f"{k!r}: {t}" for k, t in self._batch_spec.items())
                raise CompileError(
                    f"{find_source()}: the batch has no {key!r}; the data source gives {{{keys}}}"
                )
            type_ = self._batch_spec[key]
            attrs = Attrs({"name": key, "dtype": type_.dtype.value, "shape": type_.shape})
            self._inputs[key] = self.emit(INPUT, [], attrs)[0]
        return self._inputs[key]

    def name_of(self, stored: object, kind: str, source: SourceLocation) -> str:
        """Return the path of what the model keeps. Raises CompileError for a stranger."""
        name = self._stored_names.get(id(stored))
        if name is None:
            raise CompileError(
                f"{find_source()}: a {kind} made at {source} is not part of the model that was"
                " given to the job; keep it as an attribute of the model or of one of its modules"
            )
        return name

    def variable(
        self,
        name: str,
        type_: TensorType,
        role: str,
        init: InitSpec,
        source: SourceLocation | None = None,
        sbp: Constraint = (),
    ) -> ValueId:
        """Return the value of a variable before this step's update, declaring it at first use."""
        if name not in self._variables:
            attrs = Attrs(
                {
                    "name": name,
                    "dtype": type_.dtype.value,
                    "shape": type_.shape,
                    "role": role,
                    "init": init,
                    **({"sbp": sbp} if sbp else {}),
                }
            )
            line = source or find_source()
            with self.builder.at(self._scope, line, device=self.regions[0]):
                self._variables[name] = self.builder.emit(VARIABLE, [], attrs)[0]
        return self._variables[name]

    def captured(self, tensor: Any) -> ValueId:
        """Return a tensor of another trace as a value of this one. Raises CompileError: none is."""
        raise CompileError(
            f"{find_source()}: a tensor traced at {tensor._trace.source} is used in another"
            " trace; tensors live only while their job, or the function that they are traced in,"
            " is traced. Return it from there instead"
        )

    def assign(self, name: str, variable: ValueId, value: ValueId) -> None:
        """Let a variable have a value from here on, to be kept at the end of the step."""
        self.assigned[name] = Assigned(variable, value, self._scope, find_source())

    def assigned_to(self, name: str) -> ValueId | None:
        """Return the value that a variable was given last; None where it has its own."""
        assigned = self.assigned.get(name)
        return None if assigned is None else assigned.value

    def has_variable(self, name: str) -> bool:
        """Whether a variable has been used."""
        return name in self._variables

    def next_random_key(self) -> int:
        """Return the identity of the next random op: its number in order of tracing."""
        self._num_random += 1
        return self._num_random

    def close(self) -> None:
        """End the trace; its tensors can no longer be used."""
        self.is_open = False


_CURRENT: ContextVar[Trace | None] = ContextVar("actorflow_trace", default=None)


def current_trace() -> Trace | None:
    """Return the trace that is being recorded, or None outside of one."""
    return _CURRENT.get()


@contextmanager
def recording(trace: Trace) -> Iterator[Trace]:
    """Make `trace` the current one; close it at the end."""
    token = _CURRENT.set(trace)
    try:
        yield trace
    finally:
        _CURRENT.reset(token)
        trace.close()
