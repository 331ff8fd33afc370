"""Docstrings as Markdown: outside of code `*`, `[` and `<` are signs, as in `x: [N, *spatial]`."""

from __future__ import annotations

import inspect
import re
from typing import Any

from griffe import Extension, Function, Parameter, ParameterKind, Parameters

CODE_OR_SIGN = re.compile(r"(^ +\*+\w+:|`[^`]+`)|([*\[<])", re.MULTILINE)


class PlainText(Extension):
    """Escapes the docstring of each object that is read, and drops those of types of values."""

    def on_object(self, *, obj: Any, **_: object) -> None:
        """Change one docstring."""
        if obj.is_attribute and "property" not in obj.labels:
            obj.docstring = None  # that of `str`, say, which says nothing about this text
        elif obj.docstring is not None:
            obj.docstring.value = escaped(obj.docstring.value)

    def on_class_members(self, *, node: Any, cls: Any, **_: object) -> None:
        """Give a class the constructor that `help` shows, and a protocol none of Python's own."""
        if cls.members.get("__init__") is not None and cls.members["__init__"].is_alias:
            del cls.members["__init__"]
        if signature := getattr(node.obj, "__signature__", None):
            cls.set_member("__init__", Function("__init__", parameters=as_shown(signature)))

    def on_function_instance(self, *, node: Any, func: Any, **_: object) -> None:
        """Show a function that takes options as `help` does; griffe reads what is wrapped."""
        shown = vars(node.parent.obj).get(func.name) if node.parent is not None else None
        if inspect.isfunction(shown) and hasattr(shown, "__wrapped__"):
            if func.docstring is not None:
                func.docstring.value = inspect.getdoc(shown) or ""
            func.parameters = as_shown(inspect.signature(shown))


def as_shown(signature: inspect.Signature) -> Parameters:
    """Return the parameters of a signature."""
    parameters = [
        Parameter(
            p.name,
            kind=ParameterKind[p.kind.name.lower()],
            annotation=None if p.annotation is p.empty else str(p.annotation),
            default=None if p.default is p.empty else repr(p.default),
        )
        for p in signature.parameters.values()
    ]
    return Parameters(*parameters)


def escaped(text: str) -> str:
    """Return a docstring whose signs outside of code are escaped; examples stay as they are."""
    paragraphs = [
        part if part.startswith("    ") else CODE_OR_SIGN.sub(_as_text, part)
        for part in text.split("\n\n")
    ]
    return "\n\n".join(paragraphs)


def _as_text(match: re.Match[str]) -> str:
    return match[1] or {"<": "&lt;"}.get(match[2], f"\\{match[2]}")
