"""A function's code by content: a digest, and the names that it looks up while it runs.

Never by `id`, which the next object may get, and never by line: code that only moved is the same.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import numpy as np

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
        return "set", sorted([repr(_content(item)) for item in value])
    return type(value).__name__, repr(value)


@functools.lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Whether a file is the user's: not ours, not Python's and not of an installed package.

    What was typed at a prompt or made by `exec` is the user's.
    """
    if filename.startswith("<frozen"):
        return False
    return not filename.startswith(_roots()) and not any([p in filename for p in _LIBRARIES])


def is_ours(filename: str) -> bool:
    """Whether a file is one of this package."""
    return filename.startswith(OURS)


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
    return module is None or name == "__main__"


@functools.cache
def _roots() -> tuple[str, ...]:
    """Return the folders of ours, of Python and of numpy, wherever they are installed."""
    folders = [_HOUSE / wing for wing in WINGS]
    folders += [_PYTHON, Path(np.__file__).parent]
    found = {str(folder) + os.sep for folder in folders}
    return tuple(sorted(found | {str(folder.resolve()) + os.sep for folder in folders}))
