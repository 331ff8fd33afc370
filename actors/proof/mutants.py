"""Small faults of a source text, one at a time: what the tests of a file have to notice.

A mutant changes one place: it drops a statement, swaps two that have effects, negates or widens a
condition, takes another bound, is off by one, or rounds the other way. Docstrings, annotations and
texts are left alone, and so is the first naming of a local, whose loss any run would notice.

Source: DeMillo, Lipton & Sayward, "Hints on test data selection", 1978; the operators are those of
Offutt et al., "An experimental determination of sufficient mutant operators", 1996, and statements.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from textwrap import indent

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
        known = {ast.unparse(function)}
        for node, edit in _edits_of(function):
            edit.do()
            mutated = ast.unparse(function)
            edit.undo()
            if mutated in known:
                continue
            known.add(mutated)
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


# -- statements ----------------------------------------------------------------------------------


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


# -- expressions ---------------------------------------------------------------------------------


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
