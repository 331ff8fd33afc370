"""Break the runtime one place at a time, and see whether its tests notice.

    python -m actors.testing.mutate [FILE ...] [--function NAME] [--every N] [--first K]
        [--limit SECONDS]    with files among machine, columns, admission, worker, dispatch, inbox,
        failure, loop, executor, waits, happens_before; default: all

A mutant changes one place of a source text: it drops a statement, swaps two that have effects,
negates or widens a condition, takes another bound, is off by one, or rounds the other way.
Docstrings, annotations and texts are left alone, and so is the first naming of a local, whose loss
any run would notice.

Every mutant of a file runs against the tests of that file, in a process of its own, until one
fails. What no test notices survives: it wants a test, or an argument why it changes nothing that
counts (`actors/testing/equivalent_mutants.txt`, a line of file and mutant over an indented reason).
A mutant that hangs is noticed, too. Exits 1 when one survives without an argument. Needs the tests,
so it runs from a checkout.

Source: DeMillo, Lipton & Sayward, "Hints on test data selection", 1978; the operators are those of
Offutt et al., "An experimental determination of sufficient mutant operators", 1996, and statements.
"""

from __future__ import annotations

import argparse
import ast
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from textwrap import indent
from types import ModuleType

_OTHER_COMPARISON: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OTHER_OPERATOR: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
    ast.Mod: ast.FloorDiv, ast.FloorDiv: ast.Mult,
}  # fmt: skip
_OTHER_CALL = {"min": "max", "max": "min", "any": "all", "all": "any"}
_BODIES = ("body", "orelse", "finalbody")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: in which function, on which line, from what to what, and the whole text with it.

    `key` stays what it is when lines move: function and change, numbered where there are several.
    """

    function: str
    line: int
    change: str
    number: int
    source: str

    @property
    def key(self) -> str:
        """Return the name of the mutant in lists."""
        return f"{self.function}: {self.change}" + (f" #{self.number}" if self.number else "")


@dataclass(frozen=True, slots=True)
class _Edit:
    """A change of the tree that can be taken back."""

    change: str
    do: Callable[[], object]
    undo: Callable[[], object]


def mutants_of(source: str) -> Iterator[Mutant]:
    """Yield every mutant of a module's functions, in the order of the text."""
    counts: Counter[tuple[str, str]] = Counter()
    for name, function in _functions(ast.parse(source), ""):
        texts = {ast.unparse(function)}
        for node, edit in _edits_of(function):
            edit.do()
            mutated = ast.unparse(function)
            edit.undo()
            if mutated in texts:
                continue
            texts.add(mutated)
            number = counts[name, edit.change]
            counts[name, edit.change] += 1
            line = getattr(node, "lineno", function.lineno)
            yield Mutant(name, line, edit.change, number, _replace(source, function, mutated))


def _replace(source: str, function: ast.FunctionDef, text: str) -> str:
    """Return the source with another text for a function."""
    lines = source.splitlines()
    start = min([function.lineno, *[d.lineno for d in function.decorator_list]]) - 1
    lines[start : function.end_lineno] = indent(text, " " * function.col_offset).splitlines()
    return "\n".join(lines) + "\n"


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")


def _edits_of(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, _Edit]]:
    """Yield the changes of one function's body, defaults and decorators left alone."""
    named = Counter(_locals(function))
    for node in _walk(function):
        for field in _BODIES:
            body = getattr(node, field, None)
            if isinstance(body, list):
                yield from _statements(body, named)
        for edit in _expressions(node):
            yield node, edit


def _walk(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield a function and all of its body but annotations, docstrings and texts."""
    todo: list[ast.AST] = [function]
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, ast.FunctionDef):
            children: list[ast.AST] = list(node.body)
        elif isinstance(node, ast.AnnAssign):
            children = [node.value] if node.value else []
        elif isinstance(node, ast.JoinedStr) or _is_strict(node):
            children = []
        else:
            children = list(ast.iter_child_nodes(node))
        todo.extend(reversed([child for child in children if not _is_text(child)]))


def _is_strict(node: ast.AST) -> bool:
    """Return whether a node is `strict=True` of a zip: it matters only where columns differ."""
    return isinstance(node, ast.keyword) and node.arg == "strict"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _locals(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _statements(body: list[ast.stmt], named: Counter[str]) -> Iterator[tuple[ast.AST, _Edit]]:
    for i, statement in enumerate(body):
        if _is_droppable(statement, named):
            yield statement, _put(body, i, ast.Pass(), f"drop `{_first_line(statement)}`")
        if i and _has_effect(statement) and _has_effect(body[i - 1]):
            first, second = body[i - 1], statement
            change = f"swap `{_first_line(first)}` and `{_first_line(second)}`"
            yield (
                statement,
                _Edit(
                    change,
                    partial(_place, body, i - 1, [second, first]),
                    partial(_place, body, i - 1, [first, second]),
                ),
            )


def _is_droppable(statement: ast.stmt, named: Counter[str]) -> bool:
    if _is_text(statement):
        return False
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        is_first = all([isinstance(t, ast.Name) and named[t.id] < 2 for t in targets])
        return not is_first and not any([isinstance(t, ast.Tuple) for t in targets])
    return not isinstance(statement, ast.Pass | ast.FunctionDef | ast.Import | ast.ImportFrom)


def _has_effect(statement: ast.stmt) -> bool:
    """Return whether a statement is a call: two assignments seldom mind their order."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0]


def _place(body: list[ast.stmt], start: int, statements: list[ast.stmt]) -> None:
    body[start : start + len(statements)] = statements


def _put(body: list[ast.stmt], index: int, new: ast.stmt, change: str) -> _Edit:
    old = body[index]
    put = body.__setitem__
    return _Edit(change, partial(put, index, new), partial(put, index, old))


def _expressions(node: ast.AST) -> Iterator[_Edit]:
    """Yield the changes of what hangs directly below a node."""
    if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        change = f"not `{ast.unparse(node.test)}`"
        yield _set(node, "test", ast.UnaryOp(ast.Not(), node.test), change)
    if isinstance(node, ast.comprehension):
        for i, test in enumerate(node.ifs):
            negated: list[ast.expr] = [*node.ifs]
            negated[i] = ast.UnaryOp(ast.Not(), test)
            yield _set(node, "ifs", negated, f"not `{ast.unparse(test)}`")
    if isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield _set(node, "op", other, _replaced(node, ast.BoolOp(other, node.values)))
        for i, left_out in enumerate(node.values if len(node.values) > 2 else ()):
            rest = [*node.values[:i], *node.values[i + 1 :]]
            yield _set(node, "values", rest, f"without `{ast.unparse(left_out)}`")
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            ops = [*node.ops]
            ops[i] = _OTHER_COMPARISON[type(op)]()
            changed = ast.Compare(node.left, ops, node.comparators)
            yield _set(node, "ops", ops, _replaced(node, changed))
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _OTHER_OPERATOR:
        operator = _OTHER_OPERATOR[type(node.op)]()
        before = ast.unparse(node)
        edit = _set(node, "op", operator, "")
        edit.do()
        after = ast.unparse(node)
        edit.undo()
        yield _set(node, "op", operator, f"`{before}` -> `{after}`")
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Name) and function.id in _OTHER_CALL:
        name = _OTHER_CALL[function.id]
        yield _set(function, "id", name, f"`{name}` in `{ast.unparse(node)}`")
    for field, value in ast.iter_fields(node):
        yield from _operands(node, field, value)


def _operands(node: ast.AST, field: str, value: object) -> Iterator[_Edit]:
    """Yield the changes that replace an operand of a node: a number, a negation, a rounding."""
    if field in ("annotation", "returns", "decorator_list", "args") and isinstance(
        node, ast.FunctionDef | ast.AnnAssign | ast.arg
    ):
        return
    if _is_strict(node):
        return
    children = value if isinstance(value, list) else [value]
    for index, child in enumerate(children):
        if not isinstance(child, ast.AST):
            continue
        for new in _others(child):
            change = f"`{ast.unparse(child)}` -> `{ast.unparse(new)}` in `{_first_line(node)}`"
            changed = [*children[:index], new, *children[index + 1 :]]
            yield _set(node, field, changed if isinstance(value, list) else new, change)


def _others(child: ast.AST) -> Iterator[ast.expr]:
    if isinstance(child, ast.BoolOp) and len(child.values) == 2:
        yield from child.values
    if isinstance(child, ast.Constant):
        if isinstance(child.value, bool):
            yield ast.Constant(not child.value)
        elif isinstance(child.value, int):
            yield ast.Constant(child.value + 1)
    elif isinstance(child, ast.UnaryOp) and isinstance(child.op, ast.Not):
        yield child.operand
    elif isinstance(child, ast.UnaryOp) and isinstance(child.op, ast.USub):
        ratio = child.operand
        if isinstance(ratio, ast.BinOp) and isinstance(ratio.left, ast.UnaryOp):
            yield ast.BinOp(ratio.left.operand, ratio.op, ratio.right)


def _set(node: ast.AST, field: str, new: object, change: str) -> _Edit:
    old = getattr(node, field)
    return _Edit(change, partial(setattr, node, field, new), partial(setattr, node, field, old))


def _replaced(old: ast.AST, new: ast.AST) -> str:
    return f"`{ast.unparse(old)}` -> `{ast.unparse(new)}`"


ROOT = Path(__file__).resolve().parents[2]
ARGUED = Path(__file__).with_name("equivalent_mutants.txt")


@dataclass(frozen=True, slots=True)
class Subject:
    """A module and the tests that have to notice its faults, the quick ones first."""

    module: str
    tests: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Return where the module's text is."""
        return ROOT / (self.module.replace(".", "/") + ".py")


_THREADS = (
    "loop/test_dispatch.py", "loop/test_loop.py", "loop/test_worker.py", "loop/test_visit.py",
    "loop/test_give_up.py", "machine/test_statistics.py", "loop/test_in_flight.py",
    "loop/test_admission.py",
)  # fmt: skip
_MACHINE = (
    "machine/test_machine.py", "machine/test_story.py",
    "testing/test_soak.py::test_every_order_of_events_gives_the_same_run_and"
    "_brings_every_slot_home[0]", "testing/test_state_space.py",
)  # fmt: skip
_ORDER = "device/plans/test_order.py"

SUBJECTS = {
    "machine": Subject("actors.machine.machine", _MACHINE),
    "columns": Subject("actors.machine.columns", _MACHINE),
    "admission": Subject(
        "actors.loop.admission",
        (
            "loop/test_admission.py", "loop/test_visit.py", "loop/test_dispatch.py",
            "loop/test_give_up.py",
        ),
    ),
    "worker": Subject(
        "actors.loop.worker", (*_THREADS, "loop/test_failure.py", "loop/test_watchdog.py")
    ),
    "dispatch": Subject("actors.loop.dispatch", _THREADS),
    "inbox": Subject("actors.loop.inbox", ("loop/test_dispatch.py", "loop/test_worker.py")),
    "failure": Subject(
        "actors.loop.failure", ("loop/test_failure.py", "loop/test_watchdog.py", *_THREADS)
    ),
    "loop": Subject("actors.loop.loop", _THREADS),
    "executor": Subject(
        "actors.device.executor", ("device/test_executor.py", "device/test_executor_mutants.py")
    ),
    "waits": Subject("actors.race.waits", ("device/test_waits.py", _ORDER)),
    "happens_before": Subject(
        "actors.race.happens_before",
        (
            "race/test_race_scale.py", "race/test_rounds.py", "race/test_clocks.py",
            "race/test_race.py", "race/test_race_oracle.py",
            f"{_ORDER}::test_a_long_period_on_a_device_is_checked_to_its_end",
        ),
    ),
}  # fmt: skip


_PRELOADED = (
    "numpy", "pytest", "compiler.contract.plan_tables", "actors.kernels.library.runtime",
    "actors.machine.protocol", "actors.machine.table", "actors.device.host",
)  # fmt: skip


class _Mutated(MetaPathFinder, Loader):
    """Imports one module from a text of its own."""

    def __init__(self, subject: Subject, source: str) -> None:
        self._subject = subject
        self._source = source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._subject.module:
            return None
        return spec_from_loader(fullname, self, origin=str(self._subject.path))

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(self._subject.path)
        exec(compile(self._source, str(self._subject.path), "exec"), module.__dict__)


def is_noticed(subject: Subject, source: str, limit_s: float) -> bool:
    """Return whether a test fails with this text of the module, or runs longer than the limit."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os._exit(_run_tests(subject, source))
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status != 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def _run_tests(subject: Subject, source: str) -> int:
    """Run the tests in this process, up to the first that fails, and return pytest's exit code."""
    import pytest

    os.setsid()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.chdir(ROOT)
    sys.meta_path.insert(0, _Mutated(subject, source))
    tests = [f"tests/actors/{name}" for name in subject.tests]
    options = ["-q", "-x", "--assert=plain", "--tb=no"]
    options += ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    return int(pytest.main([*options, *tests]))


def _preload() -> None:
    """Import what every child needs and no subject is part of; a child begins where this ends."""
    for name in _PRELOADED:
        import_module(name)
    loaded = [s.module for s in SUBJECTS.values() if s.module in sys.modules]
    if loaded:
        raise RuntimeError(f"{loaded} would run without their mutants: they are loaded already")


def argued(text: str) -> dict[str, str]:
    """Return the reasons by "file: mutant" of the list of mutants that change nothing."""
    reasons: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith(" "):
            reasons[name] = f"{reasons[name]} {line.strip()}".strip()
        else:
            name = line.strip()
            reasons[name] = ""
    return reasons


def survivors(
    subject: Subject, mutants: Iterable[Mutant], limit_s: float
) -> Iterable[tuple[Mutant, bool]]:
    """Yield every mutant, and whether it survives. Raises RuntimeError if the tests fail anyway."""
    text = subject.path.read_text()
    if is_noticed(subject, text, limit_s):
        raise RuntimeError(
            f"without any mutant the tests of {subject.module} fail, or take more than {limit_s} s"
        )
    for mutant in mutants:
        yield mutant, not is_noticed(subject, mutant.source, limit_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 when a mutant survives that nobody argued away."""
    parser = argparse.ArgumentParser(prog="python -m actors.testing.mutate", description=__doc__)
    parser.add_argument("files", nargs="*", help=f"of {', '.join(SUBJECTS)} (default all)")
    parser.add_argument("--function", help="only functions whose name ends so")
    parser.add_argument("--every", type=int, default=1, help="take every N-th mutant")
    parser.add_argument("--first", type=int, default=0, help="begin with this one")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for one mutant")
    options = parser.parse_args(arguments)
    _preload()
    reasons = argued(ARGUED.read_text())
    is_clean = True
    for name in options.files or SUBJECTS:
        subject = SUBJECTS[name]
        mutants = [
            mutant
            for mutant in mutants_of(subject.path.read_text())
            if mutant.function.endswith(options.function or "")
        ][options.first :: options.every]
        began, num_argued, num_left = time.monotonic(), 0, 0
        for mutant, is_alive in survivors(subject, mutants, options.limit):
            if not is_alive:
                continue
            is_argued = f"{name}: {mutant.key}" in reasons
            num_argued += is_argued
            num_left += not is_argued
            if not is_argued:
                where = f"{subject.path.relative_to(ROOT)}:{mutant.line}"
                print(f"{where} survives\n{name}: {mutant.key}", flush=True)
        is_clean = is_clean and not num_left
        print(
            f"{name}: {len(mutants)} mutants, {len(mutants) - num_argued - num_left} noticed,"
            f" {num_argued} argued away, {num_left} survive; {time.monotonic() - began:.0f} s",
            flush=True,
        )
    return not is_clean


if __name__ == "__main__":
    sys.exit(main())
