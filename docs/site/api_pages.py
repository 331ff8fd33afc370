"""The pages of the API: the public names of each room, for mkdocstrings to fill in."""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module
from typing import Any

import actorflow

ROOMS = {
    "actorflow": "actorflow",
    "functional": "actorflow.functional",
    "nn": "actorflow.nn",
    "init": "actorflow.nn.init",
    "optim": "actorflow.optim",
    "data": "actorflow.data",
    "augment": "actorflow.data.augment",
    "callbacks": "actorflow.callbacks",
    "metrics": "actorflow.metrics",
    "debug": "actorflow.functional.debug",
    "linalg": "actorflow.functional.linalg",
    "fft": "actorflow.functional.fft",
    "onnx": "actorflow.onnx",
}
"""The rooms that users meet, by the page of each: `api/nn.md`."""

sys.modules["actorflow.__main__"] = actorflow  # griffe imports all modules; this one would run


def api_page(room: str) -> str:
    """Return the page of a room: each of its public names, from its docstring."""
    module = import_module(room)
    short = re.sub(r"^actorflow(\.functional)?", "af", room)
    title = "Functions on tensors" if module is actorflow.functional else short
    lines = [f"# {title}", "", (module.__doc__ or "").partition("\n")[0], ""]
    for name in public_names(module):
        lines += entry(name, f"{short}.{name}", getattr(module, name))
    return "\n".join(lines)


def public_names(module: Any) -> list[str]:
    """Return the names that a page has: no rooms, and none that another page has already."""
    listed = getattr(module, "__all__", ())
    names = {*(listed or vars(module))}
    if module is actorflow:
        names -= {*actorflow.functional.__all__}
    elif module is not actorflow.functional:
        names -= {n for n in names if getattr(module, n) is getattr(actorflow, n, None)}
    homes = {name: getattr(getattr(module, name), "__module__", "") for name in names}
    floors = ("actorflow", "actors", "compiler") if listed else (module.__name__,)
    ours = [n for n in names if n[0] != "_" and homes[n].startswith(floors)]
    return sorted(ours, key=str.lower)


def entry(name: str, shown: str, value: Any) -> list[str]:
    """Return the lines of a public name, from its docstring; of a value from that of its class."""
    if not hasattr(value, "__qualname__"):
        return [f"## {shown}", "", inspect.getdoc(value) or "", ""]
    own = name if hasattr(import_module(value.__module__), name) else value.__qualname__
    options = [f'      heading: "{shown}"', f'      toc_label: "{name}"']  # "on" is a bool
    return [f"::: {value.__module__}.{own}", "    options:", *options, ""]
