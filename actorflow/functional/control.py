"""Functions that run functions: loops and choices inside of a plan.

Names, arguments and semantics are those of jax.lax. The function is traced once, so that a plan is
as long for a thousand steps as for ten. Tensors stand in tuples, lists and dicts of any depth.

The function is traced by an `InnerTrace` within the trace of the job. What it reads from outside,
tensors, parameters and entries of the batch, becomes an operand of the body, the same at each step.
Random numbers are others in each iteration: a loop that draws some has one more operand, the number
of the iteration, and a seed that is drawn outside of it (`actorflow.functional.random`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from itertools import islice
from typing import Any

import numpy as np

from actorflow.functional.random import loop_seed, random_state
from actorflow.tensor.literals import checked_size
from actorflow.tensor.tensor import Tensor, as_tensor
from actorflow.tensor.tracer import (
    InitSpec,
    PlacedProbe,
    Trace,
    find_source,
    recording,
    require_trace,
    resumed,
    source_of,
)
from compiler.contract.attrs import Attrs, AttrValue
from compiler.contract.errors import CompileError
from compiler.contract.sbp import Layout
from compiler.contract.types import DType, TensorType, ValueId
from compiler.graph.graph import SourceLocation
from compiler.graph.registry import Op
from compiler.ops.families.loops import COND, SCAN, WHILE
from compiler.ops.primitives.body import Body, add_operand, finish_body, prune_body

__all__ = [
    "cond",
    "map",
    "scan",
    "while_loop",
]


Tree = Any
"""A tensor, None, or a tuple, list or dict of trees."""


def tree_leaves(tree: Tree, what: str) -> list[Any]:
    """Return the leaves of a tree in order, dicts by keys. Raises CompileError for no tree."""
    if tree is None:
        return []
    if isinstance(tree, Mapping):
        parts = [(f"{what}[{key!r}]", tree[key]) for key in _keys(tree, what)]
    elif isinstance(tree, (tuple, list)):
        parts = [(f"{what}[{i}]", item) for i, item in enumerate(tree)]
    elif isinstance(tree, (str, bytes)) or callable(tree):
        raise CompileError(
            f"{find_source()}: {what} is {tree!r:.60}; expected a tensor, None, or a tuple, list or"
            " dict of them"
        )
    else:
        return [tree]
    return [leaf for name, part in parts for leaf in tree_leaves(part, name)]


def tree_unflatten(tree: Tree, leaves: list[Any]) -> Any:
    """Return a tree of the same form with other leaves."""
    rest = iter(leaves)

    def build(part: Tree) -> Any:
        if part is None:
            return None
        if isinstance(part, Mapping):
            # Leaves are taken in sorted order, and the dict keeps the user's.
            parts = {key: build(part[key]) for key in _keys(part, "a tree")}
            return {key: parts[key] for key in part}
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*[build(item) for item in part])
        if isinstance(part, (tuple, list)):
            return type(part)([build(item) for item in part])
        return next(rest)

    return build(tree)


def _keys(tree: Mapping[Any, Any], what: str) -> list[Any]:
    try:
        # Sorted: two dicts of the same keys in another order are one form.
        return sorted(tree)
    except TypeError:
        raise CompileError(
            f"{find_source()}: {what} has keys that have no order: {list(tree)!r:.60}"
        ) from None


def tree_structure(tree: Tree) -> Any:
    """Return what two trees of the same form have in common."""
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        return "dict", tuple([(key, tree_structure(tree[key])) for key in _keys(tree, "a tree")])
    if isinstance(tree, (tuple, list)):
        return type(tree).__name__, tuple([tree_structure(item) for item in tree])
    return "tensor"


def names_of(tree: Tree, what: str) -> list[str]:
    """Return what the leaves of a tree are called in messages."""
    if tree is None:
        return []
    if isinstance(tree, Mapping):
        return [n for key in _keys(tree, what) for n in names_of(tree[key], f"{what}[{key!r}]")]
    if isinstance(tree, (tuple, list)):
        return [n for i, item in enumerate(tree) for n in names_of(item, f"{what}[{i}]")]
    return [what]


def shown(tree: Tree) -> str:
    """Return the form of a tree in words."""
    if tree is None:
        return "None"
    if isinstance(tree, Mapping):
        return "{" + ", ".join([f"{k!r}: {shown(tree[k])}" for k in _keys(tree, "a tree")]) + "}"
    if isinstance(tree, (tuple, list)):
        return "(" + ", ".join([shown(item) for item in tree]) + ")"
    return "a tensor"


class InnerTrace(Trace):
    """A run of the function of a node. `taken` are values of the outer trace, in order of use.

    `iteration` is the operand that counts the iterations of a loop, from its first draw on.
    """

    def __init__(self, outer: Trace, what: str, *, is_loop: bool = False) -> None:
        super().__init__({}, {}, {}, is_training=outer.is_training, devices=outer.devices)
        self.mesh = outer.mesh
        self.outer = outer
        # By value of the outer trace; insertion order is the order of the node's operands.
        self.taken: dict[ValueId, ValueId] = {}
        self.batches_per_step = outer.batches_per_step
        self.regions = [0]
        self.num_precise = outer.num_precise
        self.hooks = outer.hooks
        self._what = what
        self._scope = outer._scope
        self._module_paths = outer._module_paths
        # What is to be shown of each iteration; None where nobody knows how many there are.
        self.probes: list[PlacedProbe] | None = None
        # Values and no tensors, which would hold this trace in a circle.
        self.iteration: ValueId | None = None
        self._is_loop = is_loop
        self._draws_by: tuple[ValueId, ValueId] | None = None

    def operand(self, type_: TensorType) -> Tensor:
        """Return a new operand of the body."""
        with self.builder.at(self._scope, find_source()):
            return Tensor(self, add_operand(self.builder, type_))

    def body(self, results: list[Tensor]) -> Body:
        """Return what was traced, with these results."""
        return finish_body(self.builder, [tensor._value_in(self) for tensor in results])

    def captured(self, tensor: Tensor) -> ValueId:
        """Return a tensor from outside as an operand. Raises CompileError for a closed trace's."""
        return self.take(tensor._value_in(self.outer))

    def take(self, value: ValueId) -> ValueId:
        """Return a value of the outer trace as an operand, the same one each time."""
        if value not in self.taken:
            type_ = self.outer.builder.type_of(value)
            with self.builder.at(self._scope, self.outer.builder.producer_of(value).source):
                self.taken[value] = add_operand(self.builder, type_)
        return self.taken[value]

    def emit(self, op: Op, inputs: list[ValueId], attrs: Attrs) -> tuple[ValueId, ...]:
        """Append a node. Raises CompileError where it would leave the device, stage or rank."""
        if self.regions[-1] != 0 or op.name == "copy_to":
            raise CompileError(
                f"{find_source()}: {self._what} runs on one device, and cannot change it; place"
                " the whole function: with af.device(...):"
            )
        if len(self.stages) > 1:
            raise CompileError(
                f"{find_source()}: {self._what} runs on one stage, and cannot change it; place"
                " the whole function: with af.stage(...):"
            )
        if op.name == "to_sbp":
            raise CompileError(
                f"{find_source()}: {self._what} runs on each rank separately, and cannot call"
                " to_sbp; call it on the operands or on the results"
            )
        return super().emit(op, inputs, attrs)

    def batch_input(self, key: str) -> ValueId:
        """Return an entry of the batch as an operand."""
        return self.take(self.outer.batch_input(key))

    def name_of(self, stored: object, kind: str, source: SourceLocation) -> str:
        """Return the path of what the job's model keeps."""
        return self.outer.name_of(stored, kind, source)

    def assign(self, name: str, variable: ValueId, value: ValueId) -> None:
        """Refuse: how often a body runs is not the job's to say."""
        raise CompileError(
            f"{find_source()}: {self._what} assigns to buffer {name!r}; return the value from it,"
            " and assign it outside"
        )

    def assigned_to(self, name: str) -> ValueId | None:
        """Return what the job gave a buffer, as an operand."""
        value = self.outer.assigned_to(name)
        return None if value is None else self.take(value)

    def variable(
        self,
        name: str,
        type_: TensorType,
        role: str,
        init: InitSpec,
        source: SourceLocation | None = None,
        sbp: Layout = (),
    ) -> ValueId:
        """Return a variable of the job as an operand."""
        return self.take(self.outer.variable(name, type_, role, init, source, sbp))

    def has_variable(self, name: str) -> bool:
        """Whether the job uses a variable."""
        return self.outer.has_variable(name)

    def next_probe(self, predicate: Callable[[Any], object] | None = None) -> int:
        """Return the number of the next probe of the job."""
        return self.outer.next_probe(predicate)

    def place_probe(self, placed: PlacedProbe) -> None:
        """Keep a probe for the loop, which hands its values out. Raises CompileError: none does."""
        if self.probes is None:
            raise CompileError(
                f"{placed.source}: {self._what} cannot show values, for it may not run, or nobody"
                " knows how often; return them from it, and call af.debug outside"
            )
        self.probes.append(placed)

    def next_random_key(self) -> int:
        """Return the identity of the next random op of the job."""
        return self.outer.next_random_key()

    def counted(self) -> ValueId:
        """Return the number of the iteration, an int64 scalar."""
        if self.iteration is None:
            self.iteration = self.operand(TensorType(DType.INT64, ()))._value
        return self.iteration

    def random_state(self) -> tuple[Tensor, Tensor]:
        """Return a loop's seed and iteration, or what draws go by outside of a branch."""
        if self._draws_by is None and self._is_loop:
            with resumed(self.outer):
                seed = loop_seed()
            self._draws_by = self.captured(seed), self.counted()
        elif self._draws_by is None:
            seed, counter = random_state(self.outer)
            self._draws_by = self.captured(seed), self.captured(counter)
        own_seed, own_counter = self._draws_by
        return Tensor(self, own_seed), Tensor(self, own_counter)


def scan(
    f: Callable[[Any, Any], Any],
    init: Tree,
    xs: Tree = None,
    length: int | None = None,
    reverse: bool = False,
    *,
    recompute: bool = False,
) -> tuple[Any, Any]:
    """Run `carry, y = f(carry, x)` for each entry x of `xs` along the first axis; jax.lax.scan.

        h, hs = af.scan(cell, h0, x)  # x [steps, batch, n], hs [steps, batch, hidden]

    Parameters and tensors from outside are read in `f` as anywhere. Gradients flow through, of any
    order. Random numbers of `f` are others in each iteration, also of dropout.

    Args:
        f: from (carry, x) to (carry, y); the carry keeps its form and types. Any of them may be
            None, a tensor, or a tuple, list or dict of such.
        init: the first carry.
        xs: tensors with one first axis of the same extent, the steps; or None, with a `length`.
        length: the number of steps.
        reverse: go from the last step to the first; the ys stand where the xs do.
        recompute: keep only the carries of all steps for the gradient, and compute the rest again.

    Returns the last carry, and the ys of all steps, stacked along a new first axis.
    Raises CompileError with the user's line.
    """
    trace = require_trace("af.scan")
    firsts = [as_tensor(leaf) for leaf in tree_leaves(init, "init")]
    stacks = [as_tensor(leaf) for leaf in tree_leaves(xs, "xs")]
    steps = _length(stacks, length)
    inner = InnerTrace(trace, "the function of af.scan", is_loop=True)
    probes: list[PlacedProbe] = []
    inner.probes = probes
    with recording(inner):
        carry = tree_unflatten(init, [inner.operand(t.type) for t in firsts])
        entry = tree_unflatten(
            xs, [inner.operand(TensorType(t.dtype, t.shape[1:])) for t in stacks]
        )
        new_carry, y = _pair(f, _called(f, "the function of af.scan", carry, entry))
        news = _same_carry(f, init, firsts, new_carry)
        ys = [as_tensor(leaf) for leaf in tree_leaves(y, "y")]
        seen = [Tensor(inner, value) for placed in probes for value in placed.values]
        body = inner.body([*news, *ys, *seen])
    if inner.iteration is not None:
        stacks.append(as_tensor(np.arange(steps)))
        body = _counted_body(body, inner, len(firsts) + len(stacks))
    operands = [*[t._value_in(trace) for t in (*firsts, *stacks)], *inner.taken]
    attrs: dict[str, AttrValue] = {
        "body": body,
        "length": steps,
        "reverse": bool(reverse),
        "carries": len(firsts),
        "xs": len(stacks),
        "recompute": bool(recompute),
    }
    if not body.results:
        return init, y
    results = [Tensor(trace, v) for v in trace.emit(SCAN, operands, Attrs(attrs))]
    _hand_out(trace, probes, [t._value for t in results[len(news) + len(ys) :]], bool(reverse))
    return tree_unflatten(init, results[: len(firsts)]), tree_unflatten(y, results[len(firsts) :])


def _counted_body(body: Body, inner: InnerTrace, number: int) -> Body:
    """Return a body whose operand `number`, of those before the constants, is the iteration."""
    places = [*range(len(body.operands))]
    place = body.operands.index(inner.counted())
    places.insert(number - 1, places.pop(place))
    return prune_body(body, places, range(len(body.results)))


def _hand_out(
    trace: Trace, probes: list[PlacedProbe], stacked: list[ValueId], is_reverse: bool
) -> None:
    """Show outside of a loop what its iterations were to show, of all of them at once."""
    values = iter(stacked)
    loop = trace.next_probe() if probes else 0
    for placed in probes:
        loops = (-loop if is_reverse else loop, *placed.probe.loops)
        probe = replace(placed.probe, loops=loops)
        trace.place_probe(
            replace(placed, probe=probe, values=tuple(islice(values, len(placed.values))))
        )


def map(f: Callable[[Any], Any], xs: Tree) -> Any:  # noqa: A001  # the name that JAX and lax have
    """Return `f(x)` for each entry x of `xs` along the first axis, stacked; jax.lax.map.

    One entry at a time: see `scan`, which it is without a carry.
    """
    return scan(lambda _, x: (None, _called(f, "the function of af.map", x)), None, xs)[1]


def cond(
    pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], *operands: Tree
) -> Any:
    """Return `true_fn(*operands)` where `pred` is true, else `false_fn(*operands)`; jax.lax.cond.

    Both return the same form and types. Gradients flow through. On the host only the one that is
    chosen runs; a GPU runs both, and nothing of the other one is seen: no NaN, no bad index.

    Args:
        pred: a bool of shape [].
        true_fn: what is computed where it is true; it may read tensors from outside as well.
        false_fn: what is computed else.
        operands: what both are called with.

    Raises CompileError with the user's line.
    """
    trace = require_trace("af.cond")
    flag = as_tensor(pred, DType.BOOL)
    if flag.type != TensorType(DType.BOOL, ()):
        raise CompileError(
            f"{find_source()}: af.cond chooses by a bool of shape [], got {flag.type}; reduce it,"
            " or choose element by element with af.where"
        )
    inputs = [flag, *[as_tensor(leaf) for leaf in tree_leaves(operands, "operands")]]
    branches = [
        _TracedFunction(trace, "the function of af.cond", f, inputs) for f in (true_fn, false_fn)
    ]
    results = [one.call(lambda *held: tree_unflatten(operands, list(held[1:]))) for one in branches]
    if tree_structure(results[0]) != tree_structure(results[1]):
        raise CompileError(
            f"{source_of(false_fn)}: the functions of af.cond return the same form; one returns"
            f" {shown(results[0])}, the other {shown(results[1])}"
        )
    types = [[t.type for t in one.results] for one in branches]
    for name, here, there in zip(names_of(results[0], "result"), *types, strict=True):
        if here != there:
            raise CompileError(
                f"{source_of(false_fn)}: the functions of af.cond return the same types; {name} is"
                f" {here} of one, {there} of the other; convert one with .to(...)"
            )
    if not types[0]:
        return results[0]
    values, bodies = _with_one_list(trace, inputs, branches)
    attrs = Attrs(dict(zip(("then", "otherwise"), bodies, strict=True)))
    outputs = trace.emit(COND, values, attrs)
    return tree_unflatten(results[0], [Tensor(trace, v) for v in outputs])


def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Tree,
    *,
    max_steps: int | None = None,
) -> Any:
    """Run `val = body_fun(val)` as long as `cond_fun(val)` is true; jax.lax.while_loop.

    Without `max_steps` it runs on the host alone and has no gradient, for nobody knows how many
    steps there will be.

    Args:
        cond_fun: returns a bool of shape [].
        body_fun: returns what it gets, in form and types.
        init_val: the first value: a tensor, or a tuple, list or dict of such.
        max_steps: how many steps at most, TensorFlow's maximum_iterations. Then the loop is a
            `scan` of so many steps, each of which is a `cond` that goes on or keeps the value: it
            has a gradient and runs on every device, and takes the time of all of them on a GPU.

    Raises CompileError with the user's line, also for a GPU without `max_steps`.
    """
    trace = require_trace("af.while_loop")
    firsts = [as_tensor(leaf) for leaf in tree_leaves(init_val, "init_val")]
    if not firsts:
        raise CompileError(f"{find_source()}: af.while_loop needs at least one tensor to work on")

    def goes_on(*held: Tensor) -> Tensor:
        flag = _called(
            cond_fun, "the condition of af.while_loop", tree_unflatten(init_val, list(held))
        )
        if not isinstance(flag, Tensor) or flag.type != TensorType(DType.BOOL, ()):
            came = str(flag.type) if isinstance(flag, Tensor) else type(flag).__name__
            raise CompileError(
                f"{source_of(cond_fun)}: the condition of af.while_loop is a bool of shape [], got"
                f" {came}"
            )
        return flag

    def stepped(*held: Tensor) -> list[Tensor]:
        carry = _called(
            body_fun, "the function of af.while_loop", tree_unflatten(init_val, list(held))
        )
        return _same_carry(body_fun, init_val, firsts, carry, "af.while_loop")

    if max_steps is not None:

        def step(held: list[Tensor], _: None) -> tuple[list[Tensor], None]:
            return cond(goes_on(*held), stepped, lambda *kept: [*kept], *held), None

        if checked_size(max_steps, "max_steps") < 0:
            raise CompileError(
                f"{find_source()}: af.while_loop got max_steps={max_steps}, expected 0 or more"
            )
        last, _ = scan(step, firsts, None, max_steps)
        return tree_unflatten(init_val, last)
    test, body = [
        _TracedFunction(trace, "the function of af.while_loop", f, firsts, is_loop=True)
        for f in (goes_on, stepped)
    ]
    flag = test.call(lambda *held: held)
    body.call(lambda *held: held)
    if any([one.inner.iteration is not None for one in (test, body)]):
        firsts.append(as_tensor(np.int64(0)))
        for one in (test, body):
            one.held.append(Tensor(one.inner, one.inner.counted()))
        with resumed(body.inner):
            body.results.append(body.held[-1] + 1)
    test.results = [*test.held, flag]
    values, (test_body, loop_body) = _with_one_list(trace, firsts, [test, body])
    attrs: dict[str, AttrValue] = {"carries": len(firsts), "test": test_body, "body": loop_body}
    outputs = trace.emit(WHILE, values, Attrs(attrs))
    return tree_unflatten(init_val, [Tensor(trace, v) for v in outputs])


class _TracedFunction:
    """A function of tensors, traced. `held` are its operands within, `results` its leaves."""

    def __init__(
        self,
        outer: Trace,
        what: str,
        function: Callable[..., Any],
        given: list[Tensor],
        *,
        is_loop: bool = False,
    ) -> None:
        self.inner = InnerTrace(outer, what, is_loop=is_loop)
        self.held = [self.inner.operand(t.type) for t in given]
        self.results: list[Tensor] = []
        self._function, self._what = function, what

    def call(self, arguments: Callable[..., Any]) -> Any:
        """Call it with what the operands are made into, and return what it returns."""
        with recording(self.inner):
            tree = _called(self._function, self._what, *arguments(*self.held))
            self.results = [as_tensor(leaf) for leaf in tree_leaves(tree, "result")]
        return tree_unflatten(tree, list(self.results))


def _with_one_list(
    trace: Trace, given: list[Tensor], traced: list[_TracedFunction]
) -> tuple[list[ValueId], list[Body]]:
    """Return operands that are all that some functions read, and bodies that take all of them."""
    for one in traced:
        for result in one.results:  # it may come from outside as it is
            result._value_in(one.inner)
    captures = list(dict.fromkeys([value for one in traced for value in one.inner.taken]))
    bodies: list[Body] = []
    for one in traced:
        for value in captures:
            one.inner.take(value)
        body = one.inner.body(one.results)
        inside = [*[t._value for t in one.held], *[one.inner.taken[v] for v in captures]]
        order = [body.operands.index(value) for value in inside]
        bodies.append(prune_body(body, order, range(len(one.results))))
    return [*[t._value_in(trace) for t in given], *captures], bodies


def _length(stacks: list[Tensor], length: int | None) -> int:
    """Return the number of steps. Raises CompileError where they are not agreed upon."""
    by_extent: dict[int, tuple[int, Tensor]] = {}
    for number, tensor in enumerate(stacks):
        if not tensor.ndim:
            raise CompileError(
                f"{find_source()}: af.scan slices xs along the first axis, and tensor {number} is"
                f" {tensor.type}, which has no axes"
            )
        by_extent.setdefault(tensor.shape[0], (number, tensor))
    if len(by_extent) > 1:
        types = " and ".join([f"{t.type} (number {n})" for n, t in list(by_extent.values())[:2]])
        raise CompileError(
            f"{find_source()}: xs of af.scan have first axes of different extents: {types}"
        )
    if length is None and not by_extent:
        raise CompileError(f"{find_source()}: af.scan without xs needs length=, a number of steps")
    steps = next(iter(by_extent), 0) if length is None else checked_size(length, "length")
    if steps < 0 or (by_extent and steps not in by_extent):
        expected = "0 or more" if steps < 0 else str(next(iter(by_extent)))
        raise CompileError(
            f"{find_source()}: af.scan got length={steps}, expected {expected}"
            + (", the extent of the first axis of xs" if by_extent else "")
        )
    return steps


def _called(f: Callable[..., Any], what: str, *arguments: Any) -> Any:
    """Call a function of the user's. Raises CompileError where it is none of so many arguments."""
    if not callable(f):
        raise CompileError(f"{find_source()}: {what} is no function, but {type(f).__name__}")
    with suppress(ValueError):  # what is written in C may not say what it takes
        try:
            signature(f).bind(*arguments)
        except TypeError as error:
            came = f"{what} gets {len(arguments)} arguments"
            raise CompileError(f"{source_of(f)}: {came}: {error}") from None
    return f(*arguments)


def _pair(f: Callable[..., Any], made: Any) -> tuple[Any, Any]:
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        came = f"{len(made)} values" if isinstance(made, (tuple, list)) else type(made).__name__
        raise CompileError(
            f"{source_of(f)}: the function of af.scan returns a pair (carry, y), got {came};"
            " return (carry, None) where there is no y"
        )
    return made[0], made[1]


def _same_carry(
    f: Callable[..., Any], init: Tree, firsts: list[Tensor], carry: Tree, what: str = "af.scan"
) -> list[Tensor]:
    """Return the leaves of a new carry. Raises CompileError where its form or a type changes."""
    news = tree_leaves(carry, "carry")
    if tree_structure(carry) != tree_structure(init):
        raise CompileError(
            f"{source_of(f)}: the carry of {what} keeps its form: it came as"
            f" {shown(init)}, and the function returns {shown(carry)}"
        )
    leaves = [as_tensor(new, old.dtype) for old, new in zip(firsts, news, strict=True)]
    names = names_of(carry, "carry")
    for name, old, new in zip(names, firsts, leaves, strict=True):
        if old.type != new.type:
            raise CompileError(
                f"{source_of(f)}: the carry of {what} keeps its types: {name} came as"
                f" {old.type}, and the function returns {new.type}; convert it with .to(...), or"
                " give init the type and shape that it ends with"
            )
    return leaves
