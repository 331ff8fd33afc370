"""`actorflow plan A.plan B.plan`: what changed from one plan to another.

Devices, options, arenas, actors and registers between actors are matched by name; launches by
actor, phase and label, of which several may be alike: equal ones are matched first, and the others
in their order. Numbers of versions, offsets and source lines are no changes of their own: they
follow from the others, or say where code stands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compiler.contract.accounting import peak_launch
from compiler.contract.codec import printable
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import RegisterKind
from memory.report import format_bytes

Facts = Mapping[str, Any]

_KINDS = ("job", "step", "arena", "option", "stream", "actor", "register", "launch", "kernel")
_PLURALS = {kind: f"{kind}s" for kind in _KINDS} | {"launch": "launches"}
_SIGNS = {"added": "+", "removed": "-", "changed": "~"}
_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Change:
    """One difference: facts of a thing before and after, None where it was not or is not.

    `index` is its number in the plan after (an actor's, a register's, a launch's over all actors),
    -1 where it has none.
    """

    what: str
    name: str
    before: Facts | None
    after: Facts | None
    index: int = -1

    @property
    def mark(self) -> str:
        """Whether it was added, removed or changed."""
        if self.before is None:
            return "added"
        return "removed" if self.after is None else "changed"

    @property
    def text(self) -> str:
        """The facts in words: those that differ, or all of what was added or removed."""
        old, new = self.before, self.after
        if old is None or new is None:
            facts = old or new or {}
            return ", ".join([_in_words(name, value) for name, value in facts.items() if value])
        changed = [name for name in new if old[name] != new[name]]
        return ", ".join([_before_and_after(name, old[name], new[name]) for name in changed])

    def as_json(self) -> dict[str, object]:
        """Return it as values for JSON."""
        facts = {"before": self.before, "after": self.after}
        return {"what": self.what, "name": self.name, "mark": self.mark, **facts}


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """All differences of two plans, of which `step_ns` are the predicted durations of a step."""

    before: Plan
    after: Plan
    step_ns: tuple[float, float]
    changes: tuple[Change, ...]
    is_equal: bool

    def as_json(self) -> dict[str, object]:
        """Return it as values for JSON; durations in ns, sizes in bytes."""
        plans = {"before": self.before, "after": self.after}
        return {
            "is_equal": self.is_equal,
            **{k: {"job": p.name, "fingerprint": p.fingerprint} for k, p in plans.items()},
            "step_ns": self.step_ns,
            "changes": [change.as_json() for change in self.changes],
        }

    def lines(self, *, is_full: bool = False) -> list[str]:
        """Return it as text: of each kind of thing the first few, or all."""
        before, after = self.before, self.after
        if self.is_equal:
            return [f"no difference: plan {before.name!r} {before.fingerprint[:12]} in both files"]
        lines = [
            f"plan {before.name!r} {before.fingerprint[:12]}"
            f" -> plan {after.name!r} {after.fingerprint[:12]}"
        ]
        if not self.changes:
            lines.append("only the order of launches, offsets, values or source lines differ")
        for kind in _KINDS:
            same_kind = [change for change in self.changes if change.what == kind]
            lines += _lines_of(kind, same_kind, len(same_kind) if is_full else _MOST_SHOWN)
        return lines


def compare(before: Plan, after: Plan, step_ns: tuple[float, float]) -> PlanDiff:
    """Return what changed. O(launches log launches) where few have equal labels."""
    old, new = [
        {"step": [_Thing("", "predicted time", {"takes_ns": round(ns)})], **_things(plan)}
        for plan, ns in zip((before, after), step_ns, strict=True)
    ]
    changes = [change for kind in _KINDS for change in _matched(kind, old[kind], new[kind])]
    return PlanDiff(before, after, step_ns, tuple(changes), before == after)


@dataclass(frozen=True, slots=True)
class _Thing:
    key: Hashable
    name: str
    facts: Facts
    index: int = field(default=-1, compare=False)


def _things(plan: Plan) -> dict[str, list[_Thing]]:
    """Return what is compared of a plan, by kind."""
    options = {name: _short(value) for name, value in plan.options}
    launches = _launches(plan)
    kernels = Counter([thing.facts["kernel"] for thing in launches])
    return {
        "job": [_Thing("", "name", {"name": plan.name})],
        "option": [_Thing(name, name, {"value": text}) for name, text in options.items()],
        "arena": _arenas(plan),
        "stream": [_Thing(s.name, s.name, {"device": str(s.device)}) for s in plan.streams],
        "actor": _actors(plan),
        "register": [
            _Thing(r.name, r.name, _register_facts(plan, r.id), r.id)
            for r in plan.registers
            if r.kind is not RegisterKind.TEMPORARY
        ],
        "launch": launches,
        "kernel": [_Thing(name, name, {"launches": n}) for name, n in kernels.items()],
    }


def _short(value: object) -> str:
    return "" if value in (None, "", ()) else str(value)


def _arenas(plan: Plan) -> list[_Thing]:
    things = []
    for arena, account in zip(plan.arenas, plan.memory, strict=True):
        fullest = peak_launch(plan, account)
        sizes = {"size_bytes": account.peak_bytes, "peak_live_bytes": account.peak_live_bytes}
        facts = sizes | {"peak_at": fullest.label if fullest else ""}
        things.append(_Thing(arena.place, str(arena.place), facts))
    return things


def _actors(plan: Plan) -> list[_Thing]:
    def names(ports: Iterable[Any]) -> list[str]:
        texts = [(plan.registers[port.register].name, port.rate) for port in ports]
        return [name if rate == 1 else f"{rate} {name}" for name, rate in texts]

    return [
        _Thing(
            actor.name,
            actor.name,
            {
                "kind": actor.kind.value,
                "stream": plan.streams[actor.stream].name,
                "launches": len(actor.launches),
                "inputs": names(actor.inputs),
                "outputs": names(actor.outputs),
            },
            actor.id,
        )
        for actor in plan.actors
    ]


def _register_facts(plan: Plan, number: int) -> Facts:
    register = plan.registers[number]
    return {
        "kind": register.kind.value,
        "slots": register.num_slots,
        "size_bytes": register.size_bytes,
        "arena": str(plan.arenas[register.arena].place),
    }


def _launches(plan: Plan) -> list[_Thing]:
    things: list[_Thing] = []
    for actor in plan.actors:
        for launch in actor.launches:
            types = [str(plan.views[view].type) for view in launch.outputs]
            facts = {"kernel": launch.kernel, "writes": types}
            key = actor.name, launch.phase.value, launch.label
            name = f"{actor.name}: {launch.label} ({launch.phase.value})"
            things.append(_Thing(key, name, facts, len(things)))
    return things


def _matched(what: str, old: Sequence[_Thing], new: Sequence[_Thing]) -> list[Change]:
    """Return the changes of one kind of things: those of the plan after in order, then removed."""
    waiting: dict[Hashable, list[_Thing]] = {}
    for thing in old:
        waiting.setdefault(thing.key, []).append(thing)
    others = []
    for thing in new:  # equal ones first, so that one that was added moves none of the others
        alike = waiting.get(thing.key, [])
        if thing in alike:
            alike.remove(thing)
        else:
            others.append(thing)
    changes = []
    for thing in others:
        alike = waiting.get(thing.key, [])
        before = alike.pop(0).facts if alike else None
        changes.append(Change(what, thing.name, before, thing.facts, thing.index))
    removed = [thing for things in waiting.values() for thing in things]
    return changes + [Change(what, thing.name, thing.facts, None) for thing in removed]


def _lines_of(kind: str, changes: Sequence[Change], most: int) -> list[str]:
    if not changes:
        return []
    counts = Counter([change.mark for change in changes])
    summary = ", ".join([f"{counts[mark]} {mark}" for mark in _SIGNS if counts[mark]])
    lines = [f"{_PLURALS[kind]}: {summary}"] if len(changes) > 1 else []
    indent = "  " if len(changes) > 1 else f"{kind} "
    for change in changes[:most]:
        text = f"{printable(change.name)}: {change.text}".removesuffix(": ")
        lines.append(f"{indent}{_SIGNS[change.mark]} {text}")
    if len(changes) > most:
        lines.append(f"  and {len(changes) - most} others; --full shows them")
    return lines


def _before_and_after(name: str, old: Any, new: Any) -> str:
    share = ""
    if name.endswith(("_bytes", "_ns")) and old:
        share = f" ({(new - old) / old:+.1%})"
    return f"{_in_words(name, old)} -> {_value(name, new)}{share}"


def _in_words(name: str, value: Any) -> str:
    words = name.removesuffix("_bytes").removesuffix("_ns").replace("_", " ")
    return f"{words} {_value(name, value)}"


def _value(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_ns"):
        return f"{value / 1e6:,.3f} ms"
    if isinstance(value, list):
        return printable(" + ".join(value)) or "none"
    return printable(str(value)) or "none"
