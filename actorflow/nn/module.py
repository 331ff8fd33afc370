"""A module: a tree of parameters and sub-modules found in its attributes, named by path.

What jobs know about a module is kept in it, by identity (`ByIdentity`, `Memo`): for a model may be
a dataclass, which is not hashable.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

import numpy as np

from actorflow.environment.default_seed import SEEDS, default_seed
from actorflow.nn.lease import ParameterStorage, fill, frozen, newest
from actorflow.nn.parameter import Buffer, ModelTensor, Parameter
from actorflow.tensor.arguments import validate_arguments
from actorflow.tensor.calls import pause_recording
from actorflow.tensor.habits import accept_habits
from actorflow.tensor.initial_values import initial_value
from actorflow.tensor.tensor import MODULE_HINTS, unsupported_attribute
from actorflow.tensor.tracer import current_trace, find_source
from compiler.contract.errors import CompileError

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from actorflow.nn.weights import LoadReport, Rename, Source

V = TypeVar("V")


class ByIdentity(Generic[V]):
    """A map from objects to values, by identity; an entry goes when its object does.

    A model may be a dataclass, which is not hashable, and two equal models are still two.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[object], V]] = {}

    def get(self, owner: object) -> V | None:
        """Return the value of an object, or None."""
        entry = self._entries.get(id(owner))
        return None if entry is None else entry[1]

    def set(self, owner: object, value: V) -> V:
        """Set and return the value of an object."""
        key = id(owner)
        # The callback holds the table and not this object, which it would keep alive.
        entries = self._entries
        # The entry goes before the id can belong to another object.
        self._entries[key] = (weakref.ref(owner, lambda _: entries.pop(key, None)), value)
        return value

    def pop(self, owner: object) -> V | None:
        """Take the value of an object away and return it, or None."""
        entry = self._entries.pop(id(owner), None)
        return None if entry is None else entry[1]


class Memo(ByIdentity[V]):
    """What jobs know about one owner, by job. It is kept in the owner, and no copy of it has it.

    So it goes with its owner also where an entry leads back to it, as a method that a model keeps
    as an attribute does: from elsewhere such an entry would keep the owner alive for good.
    """

    def __init__(self, owner: object) -> None:
        super().__init__()
        self._owner = weakref.ref(owner)

    def belongs_to(self, owner: object) -> bool:
        """Whether it was made for this object."""
        return self._owner() is owner

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of the owner, deep or from a file, begins without a memo."""
        return type(None), ()


class Module:
    """Base of every model. Its attributes are parameters, buffers and modules; define `__call__`.

    Lists, tuples and dicts of modules count as well; a path is the attribute names joined by dots,
    for example `blocks.0.attn.qkv.weight`. A subclass need not call `super().__init__()`;
    Python does not let it be a `list`, `dict` or exception as well.
    """

    __slots__ = ("__dict__", "__weakref__", "_memo")

    _memo: Memo[Any] | None
    """See `memo`. A slot, because it is none of the attributes that make the model."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("actorflow.nn."):  # what a user's modules take is theirs
            for name in ("__init__", "__call__"):
                if name in cls.__dict__:
                    setattr(cls, name, accept_habits(validate_arguments(cls.__dict__[name])))
        # Each class wraps only the `__call__` that it defines itself, so an inherited one is
        # wrapped once.
        if "__call__" in cls.__dict__:
            cls.__call__ = _inside_its_scope(cls.__dict__["__call__"])  # type: ignore[method-assign]  # same signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's output; to be defined by the subclass."""
        is_torchs = "; what torch calls forward is called __call__ here"
        raise CompileError(
            f"{find_source()}: {type(self).__name__} has no __call__: define what it computes"
            f"{is_torchs if hasattr(self, 'forward') else ''}"
        )

    if not TYPE_CHECKING:  # which would take any attribute for one that is there

        def __getattr__(self, name: str) -> Any:
            raise unsupported_attribute(f"{type(self).__name__!r} object", name, MODULE_HINTS)

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield (path, module) for this module and all below it, depth first, each once.

        Raises CompileError where two share a path.
        """
        for path, item in _walk(self, prefix):
            if isinstance(item, Module):
                yield path, item

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Yield (path, parameter), each once, in order of assignment.

        A shared parameter comes under its first path. Raises CompileError where two share a path.
        """
        for path, item in _walk(self, prefix):
            if isinstance(item, Parameter):
                yield path, item

    def freeze(self) -> Self:
        """Exclude all parameters of this module from every optimizer; return it."""
        for _, parameter in self.named_parameters():
            parameter.freeze()
        return self

    def unfreeze(self) -> Self:
        """Undo `freeze`, of single parameters too; return it."""
        for _, parameter in self.named_parameters():
            parameter.unfreeze()
        return self

    def named_buffers(self, prefix: str = "") -> Iterator[tuple[str, Buffer]]:
        """Yield (path, buffer), as `named_parameters` does parameters."""
        for path, item in _walk(self, prefix):
            if isinstance(item, Buffer):
                yield path, item

    def named_stored(self) -> Iterator[tuple[str, ModelTensor]]:
        """Yield (path, parameter or buffer): all that `state()` has, in order of assignment."""
        for path, item in _walk(self, ""):
            if isinstance(item, ModelTensor):
                yield path, item

    def num_parameters(self) -> int:
        """Number of scalars in all parameters; buffers are none."""
        return sum(p.type.num_elements for _, p in self.named_parameters())

    def memo(self) -> Memo[Any]:
        """Return what jobs know about this module, by job; for jobs."""
        try:
            memo = object.__getattribute__(self, "_memo")  # past any __getattr__ of the user's
        except AttributeError:
            memo = None
        # A shallow copy of a model has its slot too, and with it the memo of the original.
        if memo is None or not memo.belongs_to(self):
            memo = Memo(self)
            object.__setattr__(self, "_memo", memo)  # a frozen dataclass may be a model
        return cast("Memo[Any]", memo)

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the newest values of all parameters and buffers by path: read-only arrays.

        The arrays never change. Callable from any thread. While a run trains the model they are
        those after its last finished step, all after the same one: in `on_step` and `on_result` of
        one process that of the call, in a loop over `stream` perhaps a later one. A model that no
        run has trained and nothing was loaded into gets its first values now, as by `init()`.
        Raises CompileError while a run begins that is about to make them.
        """
        cells = self.cells()
        arrays = newest(cells)
        if len(arrays) < len(cells):
            begun = next((p for p in cells if p not in arrays and cells[p].lease is not None), None)
            if begun is not None:
                raise CompileError(
                    f"{begun!r} has no data yet: the run that trains it makes its first values when"
                    " it begins. Read them after its first step, or call init() before the run"
                )
            initialise(self, default_seed())
            arrays = newest(cells)
        return arrays

    def init(self, seed: int | None = None) -> Self:
        """Give the model its first values, which follow from the seed and each path; return it.

        Otherwise the first run of a job gives them, from the job's seed, or the first `state()`,
        from that of `af.seed`, which is 0 unless it is set. The same seed gives the same values
        wherever it is said. Raises CompileError for a model that has such values, or is about to
        get them from a run that begins.
        """
        seed = default_seed() if seed is None else seed
        if expected := SEEDS.expected(seed):
            raise CompileError(f"{find_source()}: seed must be {expected}, got {seed!r}")
        stored = {p: s for p, s in self.named_stored() if s.is_drawn}
        present = newest({path: s.cell for path, s in stored.items()})
        taken = next((p for p, s in stored.items() if p in present or s.cell.lease), None)
        if taken is not None:
            raise CompileError(
                f"{find_source()}: {taken!r} has values already, from a run, a load or an earlier"
                " read, which init would not change; make a new model, or call init first"
            )
        initialise(self, seed)
        return self

    def load(
        self,
        source: Source,
        *,
        strict: bool = True,
        rename: Rename | None = None,
        dtype: str | None = None,
    ) -> LoadReport:
        r"""Set the values of `state()`, all or none; a run has them in its next step.

        Callable from any thread. Memory, beside the values until now: a copy of what is loaded.

        Args:
            source: arrays by path, of numpy or of another library (a `state_dict` of torch); or the
                path of what `af.load` reads: a safetensors file, an index of shards, a directory,
                a run. Floats of any dtype are cast to that of the parameter.
            strict: False permits paths without values, which keep theirs, and names without a path.
                A wrong shape is an error in any case, and so is a source of which nothing fits.
            rename: how names become paths: a dict of regular expressions and what takes their
                place, each in turn, such as {r"^transformer\.": ""}; or a function of the name,
                which returns None for what is to be left out. A shared parameter may come under any
                of its paths.
            dtype: of the model's floats from now on, such as "float64"; their own by default.

        Returns what was loaded, missing and unused. Raises CompileError for what does not fit, with
        the likeliest rename, and CheckpointError for what cannot be read.
        """
        from actorflow.nn.weights import load_values  # 20 ms

        return load_values(
            dict(self.named_stored()),
            source,
            owner=type(self).__name__,
            item_at=lambda path: _item_at(self, path),
            strict=strict,
            rename=rename,
            dtype=dtype,
        )

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: str | None = None,
        shard_bytes: int | None = None,
    ) -> Path:
        """Write the values of `state()` as safetensors, durably; see `checkpoint.weights.save`.

        Args:
            path: a file `NAME.safetensors`, or a directory, which gets `model.safetensors`.
            dtype: that floats are cast to, such as "bfloat16"; their own by default.
            shard_bytes: the most bytes of a file; above it there are shards, and an index.

        Returns the file, or the index. Raises CheckpointError where it cannot be written.
        """
        from actorflow.checkpoint.weights import save  # 20 ms

        return save(self.state(), path, dtype, shard_bytes)

    def cells(self) -> dict[str, ParameterStorage]:
        """Return the storage of each value of `state()`, by path; for code that runs plans."""
        return {path: stored.cell for path, stored in self.named_stored()}

    def __repr__(self) -> str:
        """The tree of modules: settings, parameters with their types, and what is shared."""
        return "\n".join([*_tree(self, set()), f"{self.num_parameters():,} parameters"])


def initialise(model: Module, seed: int, but: Collection[str] = ()) -> None:
    """Give what has no values yet its first ones, which follow from seed and path.

    Left out are the paths `but`, unless they begin from others, which no plan knows. Whoever comes
    later, with whatever seed, finds these values.
    """
    stored = dict(model.named_stored())
    missing = {p: s for p, s in stored.items() if p not in but or s.origin is not None}
    # First values are drawn without the lock, which takes long; `fill` leaves cells that got some
    # meanwhile.
    values = newest({path: s.cell for path, s in missing.items()})
    fill(
        {
            s.cell: frozen(_first_value(path, s, stored, seed))
            for path, s in missing.items()
            if path not in values
        }
    )


def _first_value(
    path: str, stored: ModelTensor, model: dict[str, ModelTensor], seed: int
) -> np.ndarray[Any, Any]:
    if stored.origin is None:
        return initial_value(path, stored.type, stored.init, seed)
    source, function = stored.origin
    values = source.data
    if values is None:
        source_path = next((p for p, s in model.items() if s is source), None)
        if source_path is None:
            raise CompileError(
                f"{find_source()}: {path!r} begins as a function of the {source.kind} made at"
                f" {source.source}, which is no part of the model that is initialised; initialise"
                " the whole model, or give both of them values"
            )
        values = _first_value(source_path, source, model, seed)
    return stored.checked(function(values), path)


def _tree(module: Module, seen: set[int]) -> list[str]:
    """Return a module's own line and, indented, those of the modules below it."""
    seen.add(id(module))
    parts: list[str] = []
    below: list[str] = []
    for name, item in _members(module, ""):
        shared = " (shared)" if id(item) in seen else ""
        if isinstance(item, Module):
            lines = [type(item).__name__] if shared else _tree(item, seen)
            below += [f"  {name}: {lines[0]}{shared}", *[f"  {line}" for line in lines[1:]]]
        elif isinstance(item, ModelTensor):
            seen.add(id(item))
            note = " buffer" if isinstance(item, Buffer) else " frozen" if item.is_frozen else ""
            parts.append(f"{name} {item.type}{note}{_layout(item)}{shared}")
        else:
            parts.append(f"{name}={item!r}")
    return [f"{type(module).__name__}({', '.join(parts)})", *below]


def _layout(item: ModelTensor) -> str:
    words = item.sbp if isinstance(item, Parameter) else {}
    return "".join([f" {axis}={word}" for axis, word in words.items()])


def _members(item: Any, path: str, above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (path, member): modules, parameters and plain settings, those in containers too."""
    if id(item) in above:  # a list that holds itself
        return
    for name, _, child in _children(item):
        below = f"{path}.{name}" if path else name
        if isinstance(child, (Module, ModelTensor, bool, int, float, str)):
            yield below, child
        else:
            yield from _members(child, below, (*above, id(item)))


_HOLDERS = (Module, ModelTensor, list, tuple, dict)
"""What is a part of a model, or may hold some."""


def _inside_its_scope(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def scoped(self: Module, *args: Any, **kwargs: Any) -> Any:
        trace = current_trace()
        if trace is None:
            return call(self, *args, **kwargs)
        with trace.inside(self):
            result = call(self, *args, **kwargs)
        return trace.returned(self, result)

    return scoped


def _item_at(item: Any, path: str) -> object:
    """Return what lies at a path, of the several that a shared part has; None for nothing.

    A key of a dict may have dots in it, so each beginning that is a name is tried.
    """
    if not path:
        return item
    for name, _, child in _children(item):
        if path == name or path.startswith(f"{name}."):
            found = _item_at(child, path[len(name) + 1 :])
            if found is not None:
                return found
    return None


def _walk(root: Module, prefix: str) -> Iterator[tuple[str, Module | ModelTensor]]:
    """Yield what is below `root`, each object once and each path once."""
    parts: list[tuple[str, str, Module | ModelTensor]] = []
    places: dict[str, str] = {}
    recorder = pause_recording()
    try:
        _visit(root, prefix, type(root).__name__, set(), parts)
    finally:
        if recorder is not None:
            sys.settrace(recorder)
    for path, place, item in parts:
        # Two attributes may give one path: a dict with the keys 0 and "0".
        if path in places:
            raise CompileError(
                f"{find_source()}: {places[path]} and {place} share the path {path!r}; rename one"
                " of them"
            )
        places[path] = place
        yield path, item


def _visit(
    item: Any,
    path: str,
    place: str,
    seen: set[int],
    parts: list[tuple[str, str, Module | ModelTensor]],
) -> None:
    """Append (path, place as Python writes it, item), depth first."""
    if id(item) in seen:  # met already, or a list that holds itself
        return
    seen.add(id(item))
    if isinstance(item, (Module, ModelTensor)):
        parts.append((path, place, item))
    for name, step, child in _children(item):
        # Settings are left out here; only containers and parts of a model are walked.
        if isinstance(child, _HOLDERS):
            _visit(child, f"{path}.{name}" if path else name, place + step, seen, parts)


def _children(item: Any) -> list[tuple[str, str, Any]]:
    """Return (name in a path, step in Python, child) of a module or container."""
    if isinstance(item, Module):
        return [(name, f".{name}", child) for name, child in vars(item).items()]
    if isinstance(item, (list, tuple)):
        return [(str(i), f"[{i}]", child) for i, child in enumerate(item)]
    if isinstance(item, dict):
        return [(str(key), f"[{key!r}]", child) for key, child in item.items()]
    return []
