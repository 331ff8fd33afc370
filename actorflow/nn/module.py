"""A module: a tree of parameters and sub-modules found in its attributes, named by path.

What jobs know about a module is kept in it, by identity (`ByIdentity`, `Memo`): for a model may be
a dataclass, which is not hashable.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

import numpy as np

from actorflow.nn.lease import ParameterStorage, assign_values, fill, frozen, newest
from actorflow.nn.parameter import Buffer, ModelTensor, Parameter
from actorflow.tensor.initial_values import initial_value
from actorflow.tensor.tensor import MODULE_HINTS, unsupported_attribute, validate_arguments
from actorflow.tensor.tracer import current_trace, find_source
from compiler.contract.errors import CompileError

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
                    setattr(cls, name, validate_arguments(cls.__dict__[name]))
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
        one process that of the call, in a loop over `stream` perhaps a later one. Raises
        CompileError before the first run of a job has given the model its first values.
        """
        cells = self.cells()
        arrays = newest(cells)
        missing = next((path for path in cells if path not in arrays), None)
        if missing is not None:
            raise CompileError(
                f"{missing!r} has no data yet: it is initialised by the first run of a job"
            )
        return arrays

    def load(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Set all that `state()` has by path to copies; a run has them in its next step.

        All or none; callable from any thread. Raises CompileError for missing or unknown names, and
        for wrong types.
        """
        if not isinstance(arrays, Mapping):
            raise CompileError(
                f"{find_source()}: cannot load {type(self).__name__}: expected arrays by path, as"
                f" state() returns them, got {type(arrays).__name__}"
            )
        by_path = dict(self.named_stored())
        missing = [name for name in by_path if name not in arrays]
        unknown = [name for name in arrays if name not in by_path]
        if missing or unknown:
            raise CompileError(
                f"{find_source()}: cannot load {type(self).__name__}:"
                f" missing {missing or 'nothing'}, unknown {unknown or 'nothing'}"
            )
        assign_values(
            {stored.cell: stored.checked(arrays[path], path) for path, stored in by_path.items()}
        )

    def cells(self) -> dict[str, ParameterStorage]:
        """Return the storage of each value of `state()`, by path; for code that runs plans."""
        return {path: stored.cell for path, stored in self.named_stored()}

    def __repr__(self) -> str:
        """The tree of modules: settings, parameters with their types, and what is shared."""
        return "\n".join([*_tree(self, set()), f"{self.num_parameters():,} parameters"])


def initialise(model: Module, seed: int, but: Collection[str] = ()) -> None:
    """Give what has no values yet its first ones, which follow from seed and path.

    Left out are the paths `but`. Whoever comes later, with whatever seed, finds these values.
    """
    stored = {path: s for path, s in model.named_stored() if path not in but}
    # First values are drawn without the lock, which takes long; `fill` leaves cells that got some
    # meanwhile.
    values = newest({path: s.cell for path, s in stored.items()})
    fill(
        {
            s.cell: frozen(initial_value(path, s.type, s.init, seed))
            for path, s in stored.items()
            if path not in values
        }
    )


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
            return call(self, *args, **kwargs)

    return scoped


def _walk(root: Module, prefix: str) -> Iterator[tuple[str, Module | ModelTensor]]:
    """Yield what is below `root`, each object once and each path once."""
    seen: set[int] = set()
    places: dict[str, str] = {}
    for path, place, item in _visit(root, prefix, type(root).__name__, seen):
        # Two attributes may give one path: a dict with the keys 0 and "0".
        if path in places:
            raise CompileError(
                f"{find_source()}: {places[path]} and {place} share the path {path!r}; rename one"
                " of them"
            )
        places[path] = place
        yield path, item


def _visit(
    item: Any, path: str, place: str, seen: set[int]
) -> Iterator[tuple[str, str, Module | ModelTensor]]:
    """Yield (path, place as Python writes it, item), depth first."""
    if id(item) in seen:  # met already, or a list that holds itself
        return
    seen.add(id(item))
    if isinstance(item, (Module, ModelTensor)):
        yield path, place, item
    for name, step, child in _children(item):
        # Settings are left out here; only containers and parts of a model are walked.
        if isinstance(child, _HOLDERS):
            yield from _visit(child, f"{path}.{name}" if path else name, place + step, seen)


def _children(item: Any) -> list[tuple[str, str, Any]]:
    """Return (name in a path, step in Python, child) of a module or container."""
    if isinstance(item, Module):
        return [(name, f".{name}", child) for name, child in vars(item).items()]
    if isinstance(item, (list, tuple)):
        return [(str(i), f"[{i}]", child) for i, child in enumerate(item)]
    if isinstance(item, dict):
        return [(str(key), f"[{key!r}]", child) for key, child in item.items()]
    return []
