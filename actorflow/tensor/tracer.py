"""Tracing: run the user's function once with symbolic tensors and record the logical graph.

A `Trace` is the context in which symbolic tensors live. It knows the model's parameter names, the
batch's types and whether the job trains; it gives every node the user's own line and the module
path. When the function returns, the trace is closed, and a tensor that escaped from it says so when
it is used.

The user's line is the innermost frame of the stack that is neither ours nor Python's
(`find_source`). `code_facts` identifies a function's code by content, so that a graph is traced
again only where the code has changed.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

from actorflow.tensor.calls import pause_recording
from compiler.contract.attrs import Attrs, PlainValue
from compiler.contract.errors import CompileError
from compiler.contract.placement import HOST, Device, Mesh
from compiler.contract.probe import ProbeKind, TensorProbe
from compiler.contract.sbp import Layout
from compiler.contract.types import Phase, TensorType, ValueId
from compiler.graph.graph import UNPLACED, UNSTAGED, GraphBuilder, Output, SourceLocation
from compiler.graph.registry import Op, infer_type
from compiler.ops.families.gradients import emit_gradients
from compiler.ops.primitives.matmul import KEEPS_PRECISION
from compiler.ops.primitives.shape import COPY
from compiler.ops.primitives.sources import INPUT, VARIABLE, scalar

# Code is identified by content: never by `id`, which the next object may get, and never by line, as
# code that only moved is the same.

_HOUSE = Path(__file__).resolve().parents[2]
WINGS = ("actorflow", "actors", "compiler", "memory")
OURS = tuple([str(_HOUSE / wing) + os.sep for wing in WINGS])
"""How the paths of our own files begin."""

_PYTHON = Path(os.__file__).parent
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})


@dataclass(frozen=True, slots=True)
class CodeFacts:
    """A digest of a function's code, with the functions and classes inside of it.

    `loads` are the globals that it looks up, `imports` the modules that it imports while it runs,
    `names` all names, those of attributes as well.
    """

    digest: str
    loads: tuple[str, ...]
    imports: tuple[str, ...]
    names: frozenset[str]


@functools.lru_cache(maxsize=4096)
def code_facts(code: CodeType) -> CodeFacts:
    """Return the facts of a code object."""
    loads: dict[str, None] = {}
    imports: dict[str, None] = {}
    names: set[str] = set()
    for part in parts_of(code):
        names.update(part.co_names)
        for instruction in dis.get_instructions(part):
            if instruction.opname in _GLOBAL:
                loads[str(instruction.argval)] = None
            elif instruction.opname == "IMPORT_NAME":
                imports[str(instruction.argval)] = None
    # surrogatepass: names of files and constants may hold bytes that are no text.
    content = repr(_content(code)).encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(content, digest_size=6).hexdigest()
    return CodeFacts(digest, tuple(loads), tuple(imports), frozenset(names))


def parts_of(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions and classes inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from parts_of(constant)


def _content(value: object) -> object:
    """Return what tells constants apart: 1, 1.0 and True are equal, and are three constants."""
    if isinstance(value, CodeType):
        head = (value.co_code, value.co_exceptiontable, value.co_flags, value.co_argcount)
        counts = (value.co_posonlyargcount, value.co_kwonlyargcount)
        names = (value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars)
        return head, counts, names, _content(value.co_consts)
    if isinstance(value, tuple):
        return tuple([_content(item) for item in value])
    if isinstance(value, frozenset):
        # A frozenset has another order in each process (hashes of texts are salted).
        return "set", sorted([repr(_content(item)) for item in value])
    return type(value).__name__, repr(value)


@functools.lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Whether a file is the user's: not ours, not Python's and not of an installed package.

    What was typed at a prompt or made by `exec` is the user's.
    """
    if filename.startswith("<frozen"):
        return False
    # A virtual environment may lie inside the user's project, so its packages are known by their
    # folder.
    return not filename.startswith(_roots()) and not any([p in filename for p in _LIBRARIES])


def is_ours(filename: str) -> bool:
    """Whether a file is one of this package."""
    return filename.startswith(OURS)


def has_our_types(op: Op) -> bool:
    """Whether what infers the types of an op is ours: it calls no function of the user."""
    return infer_type.has(op) and _is_of_ours(infer_type.where(op))


_is_of_ours = functools.lru_cache(maxsize=4096)(is_ours)
"""The same of the files that code comes from, which are few."""


def is_pythons(filename: str, module: str) -> bool:
    """Whether a file is of Python's standard library, as what a module of some name runs.

    Both count: what is installed lies in the same folder, and a file of the user's may.
    """
    if filename.startswith("<frozen "):
        return True
    is_there = filename.startswith(_standard()) and not any([p in filename for p in _LIBRARIES])
    return is_there and module.split(".")[0] in sys.stdlib_module_names


@functools.cache
def _standard() -> tuple[str, ...]:
    """Return the folders of the standard library, as files of it may be named."""
    named = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(_PYTHON)}
    return tuple(sorted({at + os.sep for one in named for at in (one, os.path.realpath(one))}))


def is_users_module(name: str) -> bool:
    """Whether a module, by name, is the user's."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if isinstance(file, str):
        return is_users(file)
    # No file: a module of C or typed at a prompt; the latter is the user's.
    return module is None or name == "__main__"


@functools.cache
def _roots() -> tuple[str, ...]:
    """Return the folders of ours, of Python and of numpy, wherever they are installed."""
    folders = [_HOUSE / wing for wing in WINGS]
    folders += [_PYTHON, Path(np.__file__).parent]
    # Both spellings: code that was imported over a link has the path of the link.
    roots = {str(folder) + os.sep for folder in folders}
    return tuple(sorted(roots | {str(folder.resolve()) + os.sep for folder in folders}))


InitSpec = tuple[tuple[str, PlainValue], ...]
"""How a variable gets its first value: ("kind", ...) and its parameters."""


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
    # 2: this function and the one that asks for the line.
    frame = sys._getframe(2)
    # Asked for each node of a trace. Almost all frames in between are ours, which the name of the
    # file tells alone.
    while (caller := frame.f_back) is not None and (
        _is_of_ours(frame.f_code.co_filename) or _is_between(frame)
    ):
        frame = caller
    return frame


def _location(frame: FrameType) -> SourceLocation:
    code = frame.f_code
    return _location_in(_working_directory(), code.co_filename, frame.f_lineno, code.co_name)


@functools.lru_cache(maxsize=4096)
def _location_in(folder: str, file: str, line: int, function: str) -> SourceLocation:
    # Kept, since in eager mode every op of a loop asks for its line anew.
    return SourceLocation(_shown_in(folder, file), line, function)


def source_of(function: object) -> SourceLocation:
    """Return where the user defined a function, or the user's line for what has no code."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or code.co_filename.startswith(OURS):
        return find_source()
    return SourceLocation(shown_path(code.co_filename), code.co_firstlineno, code.co_name)


def _is_between(frame: FrameType) -> bool:
    return _is_between_users(frame.f_code.co_filename, str(frame.f_globals.get("__name__")))


@functools.lru_cache(maxsize=4096)
def _is_between_users(file: str, module: str) -> bool:
    if file.startswith(OURS):
        return True
    if file == "<string>":  # the __init__ that a dataclass of ours was given
        return module.split(".")[0] in WINGS
    return is_pythons(file, module)


def shown_path(filename: str) -> str:
    """Return a file as messages name it: relative to the working directory where it is in it.

    Bytes of its name that are no text, which Python has as surrogates, are shown as "?": plans and
    messages to other processes are UTF-8. Where the working directory was removed no file is in it.
    """
    return _shown_in(_working_directory(), filename)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "\0"  # no file is in it


def _shown_in(folder: str, file: str) -> str:
    return file.removeprefix(folder + os.sep).encode("utf-8", "replace").decode()


@dataclass(frozen=True, slots=True)
class Assigned:
    """The value that a variable was given last, and where in the user's program."""

    variable: ValueId
    value: ValueId
    scope: str
    source: SourceLocation


@dataclass(frozen=True, slots=True)
class PlacedProbe:
    """A probe on its way out of loops: what it shows, and where it stands in the program."""

    probe: TensorProbe
    values: tuple[ValueId, ...]
    scope: str
    source: SourceLocation


PRODUCTS = frozenset({"matmul", "conv", "conv_input_grad", "conv_weight_grad", "attention"})
"""Names of the ops that a job in 16 bits computes so, unless `af.precision` keeps them."""


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

    is_eager = False
    """Whether its tensors have data at once; see `actorflow.eager_mode`."""

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
        # Stacks of `af.device` and of stages; the innermost is last, and the first entry stays.
        self.regions = [0 if len(devices) == 1 else UNPLACED]
        self.stages = [UNSTAGED]
        self.hooks: list[Callable[[str, Any], Any]] = []
        """What hears of the results of modules, as (path, result), and may replace them."""
        self.num_precise = 0
        """Regions of `af.precision` that are open."""
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
        self._num_probes = 0
        self.predicates: dict[int, Callable[[Any], object]] = {}
        """What checks are held against, by the number of the probe; the others want finite ones."""

    def emit(self, op: Op, inputs: list[ValueId], attrs: Attrs) -> tuple[ValueId, ...]:
        """Append a node at the user's current line. Raises CompileError naming that line.

        It is on the device and the stage of the innermost regions (`actorflow.tensor.layouts`).
        """
        device, stage = self.regions[-1], self.stages[-1]
        if self.num_precise and op.name in PRODUCTS:
            attrs = Attrs({**attrs, KEEPS_PRECISION: True})
        with self.builder.at(self._scope, find_source(), device=device, stage=stage):
            return self.builder.emit(op, inputs, attrs)

    def inside(self, module: object) -> AbstractContextManager[None]:
        """Give nodes the path of `module` while its `__call__` runs."""
        return self.scope(self._module_paths.get(id(module), self._scope))

    def returned(self, module: object, result: Any) -> Any:
        """Return what a module gives whose `__call__` has returned, after it was left."""
        path = self._module_paths.get(id(module), "")
        # Inside of itself the `__call__` was that of a class above the module's own.
        if path and path != self._scope:
            for hook in tuple(self.hooks):
                result = hook(path, result)
        return result

    @property
    def module_paths(self) -> list[str]:
        """The paths of the modules below the model, in order."""
        return [path for path in self._module_paths.values() if path]

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
        # One node for each field, however often the job reads it: a plan has one register for it.
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
        sbp: Layout = (),
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
            recorder = pause_recording()
            try:
                line = source or find_source()
                # The outermost device: where a variable lives must not depend on which region reads
                # it first.
                with self.builder.at(self._scope, line, device=self.regions[0]):
                    self._variables[name] = self.builder.emit(VARIABLE, [], attrs)[0]
            finally:
                if recorder is not None:
                    sys.settrace(recorder)
        return self._variables[name]

    def captured(self, tensor: Any) -> ValueId:
        """Return a tensor of another trace as a value of this one. Raises CompileError: none is."""
        source = tensor._trace.source
        if tensor._trace.is_eager:
            raise CompileError(
                f"{find_source()}: a tensor of an eager block (at {source}) is used in a function"
                " that is traced; give its values, as x.numpy(), or pass it in the batch"
            )
        raise CompileError(
            f"{find_source()}: a tensor traced at {source} is used in another"
            " trace; tensors live only while their job, or the function that they are traced in,"
            " is traced. Return it from there instead"
        )

    def one(self, value: ValueId) -> ValueId:
        """Return the gradient of a scalar by itself."""
        b = self.builder
        with b.like_node(b.producer_of(value), Phase.BACKWARD):
            return scalar(b, 1.0, b.type_of(value).dtype)

    def gradients(
        self, seeds: Mapping[ValueId, ValueId], wanted: Sequence[ValueId]
    ) -> dict[ValueId, ValueId]:
        """Return the gradients of values, as `emit_gradients` does."""
        return emit_gradients(self.builder, seeds, wanted)

    def read(self, value: ValueId) -> np.ndarray[Any, Any] | None:
        """Return what a value holds, read-only; None where it has no data yet."""
        return None

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

    @property
    def has_drawn(self) -> bool:
        """Whether some op draws random numbers."""
        return self._num_random > 0

    def next_random_key(self) -> int:
        """Return the identity of the next random op: its number in order of tracing."""
        # From 1 in order of tracing: the key of a draw is the same in every trace of the same code.
        self._num_random += 1
        return self._num_random

    def random_state(self) -> tuple[Any, Any] | None:
        """Return the tensors that draws go by, seed and counter; None for the run's own."""
        return None

    def next_probe(self, predicate: Callable[[Any], object] | None = None) -> int:
        """Return the number of the next probe, or loop with probes, in order of tracing."""
        self._num_probes += 1
        if predicate is not None:
            self.predicates[self._num_probes] = predicate
        return self._num_probes

    def probe(
        self,
        kind: ProbeKind,
        text: str,
        values: list[ValueId],
        predicate: Callable[[Any], object] | None = None,
    ) -> None:
        """Let a run show or check some values: see `compiler.contract.probe`."""
        made = TensorProbe(self.next_probe(predicate), kind, text)
        self.place_probe(PlacedProbe(made, tuple(values), self._scope, find_source()))

    def place_probe(self, placed: PlacedProbe) -> None:
        """Make a probe outputs of the job, each by a node on the line of the probe."""
        b = self.builder
        for operand, value in enumerate(placed.values):
            device, stage = b.producer_of(value).device, self.stages[-1]
            with b.at(placed.scope, placed.source, device=device, stage=stage):
                # The attribute keeps two probes of one value apart, each with its line.
                shown = b.emit_one(COPY, value, probe=placed.probe.number)
            b.outputs.append(Output(placed.probe.name(operand), shown, placed.source))

    def close(self) -> None:
        """End the trace; its tensors can no longer be used."""
        self.is_open = False


_CURRENT: ContextVar[Trace | None] = ContextVar("actorflow_trace", default=None)


def current_trace() -> Trace | None:
    """Return the trace that is being recorded, or None outside of one."""
    return _CURRENT.get()


def require_trace(what: str, instead: str = "") -> Trace:
    """Return the current trace for what computes with tensors. Raises CompileError without one.

    `instead`: what to write where values are wanted and no tensor, as the first ones of parameters.
    """
    trace = current_trace()
    if trace is None:
        raise CompileError(
            f"{find_source()}: {what} was called outside of a job; call it inside a function"
            f" decorated with @af.job, or in a block `with af.eager():`{instead and '. '}{instead}"
        )
    return trace


@contextmanager
def recording(trace: Trace) -> Iterator[Trace]:
    """Make `trace` the current one; close it at the end."""
    try:
        with resumed(trace):
            yield trace
    finally:
        trace.close()


@contextmanager
def resumed(trace: Trace) -> Iterator[None]:
    """Make a trace that is begun already the current one for a while."""
    token = _CURRENT.set(trace)
    try:
        yield
    finally:
        _CURRENT.reset(token)
