"""What a traced graph depends on besides the function, to be compared and explained.

Rows are (what, value) texts: types of the batch, parameters with their types, and every plain
setting that the modules hold: numbers, texts, arrays (by content), and containers and plain objects
of such, to any depth. What cannot be looked into (functions, open files) counts by identity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np

from actorflow.nn.module import Module
from actorflow.nn.parameter import Parameter
from compiler.types import TensorType

Signature = tuple[tuple[str, str], ...]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


def signature_of(model: Module, spec: Mapping[str, TensorType]) -> Signature:
    """Return the signature of tracing a job on this model and these batch types."""
    rows = [(f"batch[{key!r}]", str(type_)) for key, type_ in spec.items()]
    for name, parameter in model.named_parameters():
        frozen = " frozen" if parameter.is_frozen else ""
        rows.append((f"parameter {name!r}", f"{parameter.type}{frozen}"))
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            rows += _facts(f"{path}.{key}" if path else key, value, ())
    return tuple(rows)


def difference(before: Signature, now: Signature) -> str:
    """Return in words what changed first."""
    old, new = dict(before), dict(now)
    for key, value in new.items():
        if key not in old:
            return f"{key} ({value}) is new"
        if old[key] != value:
            return f"{key} changed from {old[key]} to {value}"
    return f"{next((k for k in old if k not in new), 'the order of the parts')} is gone"


def _facts(name: str, value: Any, above: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    if isinstance(value, (Module, Parameter)) or id(value) in above:
        return  # has rows of its own, or closes a circle
    inside = (*above, id(value))
    if isinstance(value, _PLAIN):
        yield name, repr(value)
    elif isinstance(value, Enum):
        yield name, str(value)
    elif isinstance(value, np.ndarray):
        digest = hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=8).hexdigest()
        yield name, f"{value.dtype}{list(value.shape)} {digest}"
    elif isinstance(value, (list, tuple)):
        yield name, f"{type(value).__name__} of {len(value)}"
        for index, item in enumerate(value):
            yield from _facts(f"{name}[{index}]", item, inside)
    elif isinstance(value, Mapping):
        yield name, f"{type(value).__name__} of {len(value)}"
        for key, item in value.items():
            yield from _facts(f"{name}[{key!r}]", item, inside)
    elif isinstance(value, (set, frozenset)):
        yield name, f"{type(value).__name__} {sorted(map(repr, value))}"
    elif hasattr(value, "__dict__") and not callable(value):
        yield name, type(value).__qualname__
        for key, item in vars(value).items():
            yield from _facts(f"{name}.{key}", item, inside)
    else:
        yield name, f"{type(value).__qualname__} at {id(value):#x}"
