"""One mutant of a plan file, from a seed: damaged bytes, or changed rows under a right hash.

A structure-aware mutant is a plan whose rows were changed in one to three places, with its hash
made anew, and in half of the cases its accounts of memory too: else the first of all checks would
be the only one that is tried.
"""

from __future__ import annotations

import hashlib
import random
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

import msgpack

from actors.kernels.host import catalogue
from compiler.contract.accounting import account
from compiler.contract.errors import ActorflowError
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import ActorKind, RegisterKind
from compiler.contract.types import DType
from compiler.graph.registry import all_ops

HOSTILE = (
    "*/ __attribute__((constructor)) static void f(void) { __builtin_trap(); } /*",
    "a\nb",
    "\\\n#error x",
    "??/",
    '"; abort(); //',
    "\x1b[2J",
    "\x00",
    "../../../etc/passwd",
    "%s%n{0}",
    "x" * 100_000,
    "",
)
INTS = (0, -1, 1, 2, 7, 63, 64, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 47, 1 << 62, (1 << 64) - 1)
FLOATS = (0.0, -0.0, -1.0, 1e-300, 1e308, float("inf"), float("-inf"), float("nan"), 0.5)

Way = tuple[Any, ...]


def raw(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Return a file with damaged bytes, perhaps in its body under a right hash, and how."""
    damaged = bytearray(data)
    is_sealed = rng.random() < 0.5
    if is_sealed:
        damaged = bytearray(msgpack.unpackb(data)["body"])
    what = rng.choice(("flip", "flip", "cut", "zero", "insert", "swap"))
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(max(1, len(damaged)))
        if what == "flip":
            damaged[at] ^= 1 << rng.randrange(8)
        elif what == "cut":
            del damaged[at : at + rng.choice((1, 8, len(damaged)))]
        elif what == "zero":
            size = min(rng.choice((4, 64)), len(damaged) - at)
            damaged[at : at + size] = bytes(size)
        elif what == "insert":
            damaged[at:at] = rng.randbytes(rng.choice((1, 5, 64)))
        else:
            other = rng.randrange(len(damaged))
            damaged[at], damaged[other] = damaged[other], damaged[at]
        if not damaged:
            break
    return (sealed(bytes(damaged)) if is_sealed else bytes(damaged)), f"raw {what}"


def rehashed(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Return a file with changed rows under a right hash, and which fields were changed."""
    body = _lists(msgpack.unpackb(msgpack.unpackb(data)["body"], use_list=False))
    changes = [_change(body, rng)]
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        with suppress(TypeError, AttributeError, LookupError):  # a row that is none any more
            changes.append(_change(body, rng))
    mutant = sealed(_packed(body))
    if rng.random() < 0.5:
        mutant = _with_accounts(mutant)
    return mutant, "; ".join(changes)


def sealed(body: bytes) -> bytes:
    """Return a plan file of a body, with the hash that belongs to it."""
    digest = hashlib.blake2b(body, digest_size=16).hexdigest()
    head = {"magic": "actorflow-plan", "format": _format(), "digest": digest, "body": body}
    return msgpack.packb(head)


def _format() -> int:
    from compiler.contract.plan import PLAN_FORMAT

    return PLAN_FORMAT


def _with_accounts(mutant: bytes) -> bytes:
    try:
        plan = Plan.from_bytes(mutant)
        memory = [
            account(plan, i, stated.lower_bound_bytes, stated.text)
            for i, stated in enumerate(plan.memory)
        ]
        return replace(plan, memory=tuple(memory)).to_bytes()
    except (ActorflowError, ValueError, ArithmeticError):
        return mutant


# -- rows ----------------------------------------------------------------------------------------

_WEIGHTS = {
    "actors": 30, "views": 18, "registers": 18, "fields": 5, "variables": 5, "constants": 4,
    "parts": 4, "streams": 3, "arenas": 3, "options": 4, "memory": 2, "sources": 1,
    "recomputation": 1, "name": 1, "graph_hash": 1, "target": 1,
}  # fmt: skip


def _change(body: list, rng: random.Random) -> str:
    """Change one place of a plan, or of one within it; return its way, with * in tables."""
    columns = [field.name for field in fields(Plan) if field.init]
    inner = [
        attr[1]["sub_plan"]
        for actor in body[columns.index("actors")]
        for launch in actor[4]
        for attr in launch[2]
        if isinstance(attr[1], dict) and "sub_plan" in attr[1]
    ]
    if inner and rng.random() < 0.7:
        sub_plan = rng.choice(inner)
        if rng.random() < 0.2:
            place = rng.randrange(1, len(sub_plan))
            sub_plan[place] = _other_plain(sub_plan[place], rng)
        else:
            _change(sub_plan[0], rng)
        return "launch.attrs.sub_plan"
    name = rng.choices(columns, [_WEIGHTS.get(column, 1) for column in columns])[0]
    hint = get_type_hints(Plan)[name]
    column = columns.index(name)
    if name == "actors" and rng.random() < 0.8:
        return _change_launch(body, column, rng)
    if name == "views" and rng.random() < 0.4:
        return _change_type(body, column, rng)
    if name == "registers" and rng.random() < 0.3:
        return _change_slots(body[column], rng)
    return name + _change_value(body, column, hint, rng)


def _change_launch(body: list, column: int, rng: random.Random) -> str:
    """Change a launch: its operands, attributes, kernel, op, workspace; or the chain around it."""
    actors = [actor for actor in body[column] if actor[4]]
    if not actors:
        return "actors: none"
    chain = rng.choice(actors)[4]
    place = rng.randrange(len(chain))
    launch = chain[place]
    what = rng.choice(
        ("operand", "operand", "operands", "attr", "attr", "attr", "kernel", "op", "workspace",
         "version", "chain", "value")
    )  # fmt: skip
    num_views = len(body[[f.name for f in fields(Plan) if f.init].index("views")])
    side = rng.choice((3, 4))
    if what == "operand" and launch[side]:
        other = rng.choice(chain)[rng.choice((3, 4))]
        new = rng.choice(other) if other and rng.random() < 0.7 else rng.randrange(num_views)
        launch[side][rng.randrange(len(launch[side]))] = new
    elif what == "operands":
        _change_list(launch[side], rng)
        if rng.random() < 0.5:
            _change_list(launch[10 if side == 3 else 11], rng)
    elif what == "attr" and launch[2]:
        attr = rng.choice(launch[2])
        if rng.random() < 0.1:
            attr[0] = rng.choice((*HOSTILE, attr[0].upper()))
        else:
            attr[1] = _other_plain(attr[1], rng)
        return f"launch.attrs.{attr[0] if len(attr[0]) < 20 else '?'}"
    elif what == "kernel":
        names = list(catalogue.kernels_by_name())
        fitting = [n for n in names if n.endswith("." + launch[1])]
        launch[0] = rng.choice(fitting if fitting and rng.random() < 0.7 else [*names, *HOSTILE])
    elif what == "op":
        launch[1] = rng.choice([*[op.name for op in all_ops()], *HOSTILE])
        if rng.random() < 0.7:
            launch[0] = f"{rng.choice(('numpy', 'c'))}.{launch[1]}"
    elif what == "workspace":
        launch[5] = rng.choice((None, rng.randrange(num_views), -1, 1 << 40))
    elif what == "version":
        versions = launch[rng.choice((10, 11))]
        if versions:
            versions[rng.randrange(len(versions))] = rng.choice((*INTS, *versions, -2, -3))
    elif what == "chain":
        _change_list(chain, rng)
    else:
        index = rng.randrange(len(launch))
        launch[index] = _other_plain(launch[index], rng)
        return f"launch[{index}]"
    return f"launch.{what}"


def _change_type(body: list, column: int, rng: random.Random) -> str:
    """Change a view so that it still makes sense by itself: shape and strides, dtype, offset."""
    view = rng.choice(body[column])
    (dtype, shape), strides = view[2], view[3]
    what = rng.choice(("stand", "grow", "shrink", "transpose", "dtype", "offset", "register"))
    if what == "stand" and strides:
        strides[rng.randrange(len(strides))] = 0
    elif what in ("grow", "shrink") and shape:
        axis = rng.randrange(len(shape))
        shape[axis] = max(0, shape[axis] + (rng.choice((1, 64)) if what == "grow" else -1))
    elif what == "transpose" and len(shape) > 1:
        shape.reverse()
        strides.reverse()
    elif what == "dtype":
        view[2][0] = rng.choice([d.value for d in DType])
    elif what == "offset":
        view[1] = max(0, view[1] + rng.choice((-64, -4, 1, 4, 64)))
    else:
        view[0] = rng.choice(body[column])[0]
    return f"views.{what if dtype else '?'}"


def _change_slots(registers: list, rng: random.Random) -> str:
    """Change slots and offsets of a register together, or swap the bytes of two."""
    register = rng.choice(registers)
    what = rng.choice(("slot", "fewer", "move", "swap", "kind", "interval"))
    if what == "slot":
        register[5] += 1
        register[6].append(rng.choice(rng.choice(registers)[6]))
    elif what == "fewer" and register[5] > 1:
        register[5] -= 1
        register[6].pop()
    elif what == "move":
        register[6] = [max(0, at + rng.choice((-64, 64, 128))) for at in register[6]]
    elif what == "swap":
        other = rng.choice(registers)
        register[6], other[6] = other[6], register[6]
    elif what == "kind":
        register[2] = rng.choice([kind.value for kind in RegisterKind])
    else:
        register[7] = [rng.choice(INTS[:6]), rng.choice(INTS[:6])]
    return f"registers.{what}"


def _change_value(holder: list, place: Any, hint: Any, rng: random.Random) -> str:
    """Walk down to some value, and change it or the list that holds it; return the way."""
    value = holder[place]
    inner = get_args(hint)
    is_many = get_origin(hint) is tuple and len(inner) == 2 and inner[1] is Ellipsis
    if is_dataclass(hint) and isinstance(value, list) and rng.random() < 0.97:
        hints = get_type_hints(hint)
        index = rng.randrange(len(value))
        name = fields(hint)[index].name
        return f".{name}" + _change_value(value, index, hints[name], rng)
    if is_many and value and rng.random() < 0.85:
        return _change_value(value, rng.randrange(len(value)), inner[0], rng)
    if isinstance(value, list) and value and rng.random() < 0.7:
        _change_list(value, rng)
        return " rows"
    if isinstance(hint, type) and issubclass(hint, Enum):
        others = [m.value for m in hint]
        holder[place] = rng.choice((*others, *others, "", 0, *[k.value for k in ActorKind]))
    else:
        holder[place] = _other_plain(value, rng)
    return ""


def _change_list(items: list, rng: random.Random) -> None:
    """Drop, double or swap items of a list."""
    if not items:
        items.append(rng.choice(INTS))
        return
    place, other = rng.randrange(len(items)), rng.randrange(len(items))
    what = rng.choice(("drop", "double", "swap"))
    if what == "drop":
        del items[place]
    elif what == "double":
        items.insert(other, _lists(items[place]))
    else:
        items[place], items[other] = items[other], items[place]


def _other_plain(value: Any, rng: random.Random) -> Any:
    """Return another value, mostly of the same kind."""
    if rng.random() < 0.1:
        return rng.choice((None, 0, 1.5, "text", b"bytes", True, [], [[[[]]]], {}, {"a": 1}, -5))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        near = (value + 1, value - 1, value * 2, value // 2, value ^ (1 << rng.randrange(16)))
        return rng.choice((*near, *near, *INTS))
    if isinstance(value, float):
        return rng.choice((value * 2, -value, value + 1e-3, *FLOATS))
    if isinstance(value, str):
        return rng.choice((*HOSTILE, value + "x", value[:-1], "float32", "int64", "add", "data"))
    if isinstance(value, bytes):
        changed = bytearray(value or b"\0")
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return rng.choice((bytes(changed), bytes(changed), value[:-1], value + b"\0", b""))
    if isinstance(value, list):
        if value and rng.random() < 0.8:
            place = rng.randrange(len(value))
            value[place] = _other_plain(value[place], rng)
        else:
            _change_list(value, rng)
        return value
    if isinstance(value, dict) and value:  # a structure: its kind, and its row
        ((kind, row),) = value.items()
        if rng.random() < 0.1:
            return {rng.choice((*HOSTILE, kind + "x")): row}
        return {kind: _other_plain(row, rng)}
    return rng.choice((0, "", []))


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {kind: _lists(row) for kind, row in value.items()}
    return [_lists(item) for item in value] if isinstance(value, (tuple, list)) else value


def _packed(body: list) -> bytes:
    try:
        return msgpack.packb(body)
    except (OverflowError, ValueError):  # a number of more than 64 bits
        return msgpack.packb(str(body)[:1000])
