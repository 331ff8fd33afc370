"""The vector-Jacobian product of a fused op: a fused op whose program is derived.

That of op `f` is op `f_grad`, defined when it is first asked for; that of `f_grad` is
`f_grad_grad`. An op that is one instruction has no product: its gradient is the instruction's rule,
emitted as ops of the graph, which other ops' gradients then meet and simplify.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler.contract.attrs import Attrs, AttrValue
from compiler.contract.errors import CompileError
from compiler.contract.program import (
    COLUMN_REDUCTIONS,
    ROW_REDUCTIONS,
    FusedProgram,
    Instruction,
    Kind,
    ProgramInput,
    joined,
)
from compiler.contract.types import DType, TensorType, ValueId
from compiler.graph.columns import local_attrs
from compiler.graph.graph import Gradient, Graph, GraphBuilder, Node, gradient
from compiler.graph.program_builder import ProgramBuilder
from compiler.graph.registry import (
    Op,
    OpTypeError,
    Types,
    broadcast_shape,
    define,
    expect_inputs,
    expect_type,
    free_name,
    infer_type,
)
from compiler.ops.language.definition import (
    OP_OF_INSTRUCTION,
    Fused,
    FusedOp,
    ProgramOperand,
    ProgramSignature,
    definition,
    definition_cache,
    output_of,
    register_program,
    trace,
)
from compiler.ops.language.expressions import (
    RULES,
    Adjoints,
    Expression,
    Extents,
    Signature,
    power_gradient,
)

# Reverse mode over the instructions of a program (Griewank & Walther, Evaluating Derivatives, 2008,
# section 3.2), by the rules of `compiler.ops.language.expressions`. What a value lacks of rows or
# columns was broadcast to what reads it, so its adjoint is summed over them; what a sum over
# columns reads gets the sum's adjoint.
#
# **What is read.** Of the operands and outputs of the forward node, only those that the derived
# program uses become operands of the gradient's, so that the others may die. A value that is an
# output per row or column is read, as it is small; one that is a whole output is computed again,
# unless reading it needs no more whole tensors than not (e^x: the output in place of x).

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Derived:
    """A product's program. `operands` are positions among (gradients, operands, outputs)."""

    form: ProgramSignature
    program: FusedProgram
    operands: tuple[int, ...]
    wanted: tuple[int, ...]


def float_slots(form: ProgramSignature) -> Ints:
    """Return the positions of operands that can have a gradient."""
    return tuple([i for i, slot in enumerate(form.inputs) if slot.dtype.is_float])


@definition_cache(512)
def differentiate_program(
    found: Fused, form: ProgramSignature, attrs: Attrs, given: Ints, wanted: Ints
) -> Derived:
    """Return the product's program for the outputs `given` and the operands `wanted`.

    Operands to which nothing flows are left out of the result's `wanted`.
    """
    q = form.builder()
    pool = _pool(form, given)
    values = tuple([q.input(ProgramInput(slot.dtype, slot.kind)) for slot in pool])
    first, last = len(given), len(given) + len(form.inputs)
    forward = found.emit(q, attrs, form.extents, values[first:last])
    adjoints = _overridden(found, q, form, attrs, given, values, forward)
    if adjoints is None:
        seeds = [(forward[i], values[n]) for n, i in enumerate(given)]
        active = {values[first + i] for i in wanted}
        found_adjoints = _adjoints(q, form, values[first:last], seeds, active)
        adjoints = [found_adjoints.get(v) for v in values[first:last]]
    kinds = [_kind_of_gradient(slot.kind) for slot in form.inputs]
    reached = tuple([i for i in wanted if adjoints[i] is not None])
    outputs = tuple([output_of(q, adjoints[i], kinds[i]) for i in reached])
    slots = tuple(
        [ProgramOperand(f"d{form.inputs[i].name}", kinds[i], form.inputs[i].dtype) for i in reached]
    )
    whole = q.whole(outputs)
    saved = {v: values[last + i] for i, v in enumerate(forward) if v not in values}
    small = {v: n for v, n in saved.items() if q.kind_of(n) is not Kind.FULL}
    both = [_written(whole, form, s, reached) for s in (saved, small)]
    wide = [i >= first and slot.kind is Kind.FULL for i, slot in enumerate(pool)]
    program, operands = min(both, key=lambda made: sum([wide[i] for i in made[1]]))
    return Derived(
        ProgramSignature(tuple([pool[i] for i in operands]), slots, form.extents),
        program,
        operands,
        reached,
    )


def _pool(form: ProgramSignature, given: Ints) -> list[ProgramOperand]:
    """Return what a product may read: gradients, operands, outputs."""
    outputs = [form.outputs[i] for i in given]
    grads = [ProgramOperand(f"d{slot.name}", slot.kind, slot.dtype) for slot in outputs]
    return [*grads, *form.inputs, *form.outputs]


def _kind_of_gradient(kind: Kind) -> Kind:
    """A number has a gradient per row, which is summed outside: no instruction sums all rows."""
    return Kind.ROW if kind is Kind.SCALAR else kind


def _written(
    whole: FusedProgram, form: ProgramSignature, saved: dict[int, int], reached: Ints
) -> tuple[FusedProgram, Ints]:
    """Return a program that reads values where they are `saved`, and what it reads at all."""
    p = form.builder()
    ids = [p.input(operand) for operand in whole.inputs]
    if not reached:
        return FusedProgram((), (), ()), ()
    for number, instruction in enumerate(whole.instructions, len(ids)):
        operands = tuple([ids[v] for v in instruction.operands])
        if number in saved:
            ids.append(ids[saved[number]])
        elif instruction.op == "check_index":  # the forward node has checked
            ids.append(operands[0])
        else:
            ids.append(p.repeat(instruction, operands))
    outputs = [output_of(p, Expression(p, ids[v]), p.kind_of(ids[v])) for v in whole.outputs]
    return p.finish(tuple(outputs))


def _overridden(
    found: Fused,
    q: ProgramBuilder,
    form: ProgramSignature,
    attrs: Attrs,
    given: Ints,
    values: Ints,
    forward: Ints,
) -> list[Expression | None] | None:
    """Return the adjoints of operands by the definition's own formula, where it serves."""
    if not isinstance(found, FusedOp) or found.gradient is None:
        return None
    if any([f"d{form.outputs[i].name}" not in found.gradient.takes for i in given]):
        return None
    e = form.extents
    named = {
        slot.name: Expression(q, value, () if e is None else e.of(slot.kind))
        for slot, value in zip(_pool(form, given), values, strict=True)
    }
    wide = _wide_kinds(q, form, values[len(given) : len(given) + len(form.inputs)])
    for i in given:
        name = f"d{form.outputs[i].name}"
        named[name] = _once(named[name], wide[forward[i]])
    for slot in form.outputs:
        if f"d{slot.name}" not in named:  # nothing flows back to this output
            named[f"d{slot.name}"] = Expression(q, q.constant(0.0, slot.dtype))
    slots = [form.inputs[i] for i in float_slots(form)]
    adjoints = found.gradient.results(named, found.settings(attrs), [slot.name for slot in slots])
    by_name = {s.name: _as_written(m, s, form) for s, m in zip(slots, adjoints, strict=True)}
    return [by_name.get(slot.name) for slot in form.inputs]


def _as_written(adjoint: object, slot: ProgramOperand, form: ProgramSignature) -> Expression | None:
    """Check an adjoint, and sum one that has more rows or columns than its operand."""
    if adjoint is None:
        return None
    if not isinstance(adjoint, Expression):
        raise OpTypeError(f"returns a {type(adjoint).__name__} for {slot.name}, no expression")
    if adjoint.dtype is not slot.dtype:
        raise OpTypeError(
            f"returns {adjoint.dtype} for {slot.name}, which is of {slot.dtype}; cast it with"
            f" .to({slot.name}.dtype)"
        )
    own_kind, kind = adjoint.emitter.kind_of(adjoint.value), _kind_of_gradient(slot.kind)
    if form.extents is None or own_kind is not Kind.FULL:
        return adjoint
    return _summed(adjoint, Kind.FULL, kind)


def _adjoints(
    q: ProgramBuilder,
    form: ProgramSignature,
    operands: Ints,
    seeds: list[tuple[int, int]],
    active: set[int],
) -> dict[int, Expression]:
    """Walk the program backwards from its outputs; return the adjoints of what was reached."""
    wide = _wide_kinds(q, form, operands)
    flows = set(active)
    for number in range(q.num_values):
        maker = q.made_by(number)
        if not isinstance(maker, Instruction) or not maker.dtype.is_float or maker.op not in RULES:
            continue
        if any([v in flows for v in maker.operands]):
            flows.add(number)
    adjoints: dict[int, Expression] = {}
    for value, seed in seeds:
        _add(adjoints, value, _once(Expression(q, seed), wide[value]))
    for number in range(len(wide) - 1, -1, -1):
        maker, adjoint = q.made_by(number), adjoints.get(number)
        if adjoint is None or number not in flows or not isinstance(maker, Instruction):
            continue
        inputs = [Expression(q, v) for v in maker.operands]
        parts = RULES[maker.op](adjoint, Expression(q, number), *inputs)
        for value, part in zip(maker.operands, parts, strict=True):
            if part is not None and value in flows:
                reads = Kind.FULL if maker.op in _REDUCTIONS else wide[number]
                _add(adjoints, value, _summed(part, reads, wide[value]))
    return {v: a for v, a in adjoints.items() if v in flows}


_REDUCTIONS = ROW_REDUCTIONS + COLUMN_REDUCTIONS


def _once(grad: Expression, wide: Kind) -> Expression:
    """Return the gradient of an output in one row alone, where rows will be summed and it has none.

    Of a scalar operand alone such outputs are computed: c[] = s * s.
    """
    p = grad.emitter
    if p.rows == 1 or wide not in (Kind.FULL, Kind.ROW):
        return grad
    if p.kind_of(grad.value) in (Kind.FULL, Kind.ROW):
        return grad
    return (grad.row_index() == 0).where(grad, 0.0)


def _add(adjoints: dict[int, Expression], value: int, part: Expression) -> None:
    earlier = adjoints.get(value)
    adjoints[value] = part if earlier is None else earlier + part


def _wide_kinds(q: ProgramBuilder, form: ProgramSignature, operands: Ints) -> list[Kind]:
    """Return, per value, over which rows and columns it may differ, a number for each row.

    A scalar operand counts as one per row, and so does what is computed of it.
    """
    wide: list[Kind] = []
    kind_of = {v: _kind_of_gradient(s.kind) for v, s in zip(operands, form.inputs, strict=True)}
    for number in range(q.num_values):
        maker = q.made_by(number)
        if isinstance(maker, Instruction) and maker.operands and maker.op not in _REDUCTIONS:
            kind = joined([wide[v] for v in maker.operands])
            wide.append(Kind.FULL if maker.op == "philox" else kind)
        else:
            wide.append(kind_of.get(number, maker.kind))
    return wide


def _summed(part: Expression, found: Kind, wanted: Kind) -> Expression:
    """Sum an adjoint over what a value of kind `found` has and one of kind `wanted` lacks.

    The adjoint itself may be a lesser value: what it lacks is counted instead of summed.
    """
    p = part.emitter
    has_columns = found in (Kind.FULL, Kind.COLUMN)
    has_rows = found in (Kind.FULL, Kind.ROW)
    if has_columns and wanted in (Kind.ROW, Kind.SCALAR):
        part = part.sum()
    if has_rows and wanted in (Kind.COLUMN, Kind.SCALAR) and p.rows != 1:
        if p.kind_of(part.value) in (Kind.COLUMN, Kind.SCALAR):
            part = part * p.rows
        else:
            part = Expression(p, p.reduce("column_sum", part.value))
    return part


@dataclass(frozen=True, slots=True, eq=False)
class Vjp:
    """The vector-Jacobian product of a fused op: a fused op whose program is derived.

    Its attributes are those of what it is the product of; `given` of outputs whose gradients come,
    where there are several outputs; `wanted` of operands whose gradients it makes, where these are
    not all float ones; and once, whatever is differentiated how often, `shape` with the extents and
    `integers` with the dtypes of operands of integers.
    """

    op: Op
    of: FusedOp | Vjp
    depth: int
    where: str

    @property
    def signature(self) -> Signature:
        """That of the op that was written down."""
        return self.of.signature

    def inner(self, attrs: Attrs) -> Attrs:
        """Return the attributes of what this is the product of."""
        own_keys = {self.key("given"), self.key("wanted")}
        own_keys |= {"shape", "integers"} if self.depth == 1 else set()
        return Attrs({k: v for k, v in attrs.items() if k not in own_keys})

    def outer(self, form: ProgramSignature, attrs: Attrs, given: Ints, wanted: Ints) -> Attrs:
        """Return the attributes of the product for a call with these attributes."""
        added: dict[str, AttrValue] = dict(attrs)
        if len(form.outputs) > 1:
            added[self.key("given")] = given
        if wanted != float_slots(form):
            added[self.key("wanted")] = wanted
        if self.depth == 1 and form.extents is not None:
            added["shape"] = form.extents.shape
        integers = tuple([s.dtype.value for s in form.inputs if s.dtype.is_integer])
        if self.depth == 1 and integers:
            added["integers"] = integers
        return Attrs(added)

    def derived(self, dtype: DType, attrs: Attrs) -> Derived:
        """Return the program for a common dtype."""
        return _derived(self, dtype, attrs)

    def inner_form(self, dtype: DType, attrs: Attrs) -> ProgramSignature:
        """Return the form of what this is the product of."""
        if isinstance(self.of, Vjp):
            return self.of.derived(dtype, self.inner(attrs)).form
        integers = list(attrs["integers"]) if "integers" in attrs else []  # type: ignore[arg-type]  # names
        types: list[TensorType] = []
        extents = self._extents(attrs)
        for spec in self.signature.inputs:
            spec_dtype = DType.BOOL if spec.elements == "bool" else dtype
            if spec.elements == "int":
                spec_dtype = DType(integers.pop(0))
            shape = () if extents is None else extents.of(spec.kind or Kind.FULL)
            types.append(TensorType(spec_dtype, shape))
        return self.of.form(tuple(types), self.inner(attrs))

    def form(self, inputs: Types, attrs: Attrs) -> ProgramSignature:
        """Return how the operands of a call lie."""
        return self.derived(inputs[0].dtype, attrs).form

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        """Return the types of the gradients."""
        if not inputs or not inputs[0].dtype.is_float:
            raise OpTypeError("needs the gradient of an output first, of floats")
        form = self.derived(inputs[0].dtype, attrs).form
        expect_inputs(inputs, *[slot.name for slot in form.inputs])
        # A gradient that is one number everywhere may come narrow.
        shapes = [type_.shape for type_ in inputs]
        wide = shapes[0] if form.extents is not None else _widest(shapes)
        for slot, type_ in zip(form.inputs, inputs, strict=True):
            if form.extents is None:
                shape = type_.shape if _stretches(type_.shape, wide) else wide
            else:
                shape = form.extents.of(slot.kind)
            expect_type(type_, slot.name, TensorType(slot.dtype, shape))
        e = form.extents
        return tuple(
            [TensorType(s.dtype, wide if e is None else e.of(s.kind)) for s in form.outputs]
        )

    def emit(
        self, p: ProgramBuilder, attrs: Attrs, extents: Extents | None, values: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Emit the derived program on values."""
        outputs = p.replay(self.derived(p.dtype_of(values[0]), attrs).program, values)
        wide = joined([p.kind_of(v) for v in values])
        if extents is None:
            return tuple([output_of(p, Expression(p, v), wide) for v in outputs])
        return outputs

    def _extents(self, attrs: Attrs) -> Extents | None:
        if self.signature.is_elementwise:
            return None
        shape = attrs.ints("shape")
        cut = len(shape) - len(self.signature.axes)
        return Extents(shape[:cut], shape[cut:])

    def key(self, name: str) -> str:
        """Return the name of an attribute of this product, beside those of inner ones."""
        return name if self.depth == 1 else f"{name}{self.depth}"


def _widest(shapes: list[Ints]) -> Ints:
    """Return what shapes are stretched to; where they do not fit, the first of them."""
    try:
        return broadcast_shape(*shapes)
    except OpTypeError:
        return shapes[0]


def _stretches(shape: Ints, wide: Ints) -> bool:
    """Whether numpy's rule stretches a shape to a wide one."""
    last = wide[len(wide) - len(shape) :]
    return len(shape) <= len(wide) and all([n in (1, m) for n, m in zip(shape, last, strict=True)])


@definition_cache(512)
def _derived(product: Vjp, dtype: DType, attrs: Attrs) -> Derived:
    form = product.inner_form(dtype, attrs)
    given = _ints(attrs, product.key("given"), tuple(range(len(form.outputs))))
    wanted = _ints(attrs, product.key("wanted"), float_slots(form))
    return differentiate_program(product.of, form, product.inner(attrs), given, wanted)


def _ints(attrs: Attrs, key: str, default: Ints) -> Ints:
    return attrs.ints(key) if key in attrs else default


_PRODUCTS: dict[str, Vjp] = {}
"""By the name of what they are products of."""


def _with_extents(attrs: Attrs, shape: tuple[int, ...]) -> Attrs:
    return Attrs({**attrs, "shape": shape}) if "shape" in attrs else attrs


def vjp_of(found: FusedOp | Vjp) -> Vjp:
    """Return the vector-Jacobian product of a fused op, defined at the first call."""
    name = found.op.name
    if name not in _PRODUCTS:
        depth = found.depth + 1 if isinstance(found, Vjp) else 1
        op = define(free_name(f"{name}_grad"))
        product = _PRODUCTS[name] = Vjp(op, found, depth, found.where)
        infer_type.register(product.op, definition_cache(1024)(product.infer), product.where)
        register_program(product.op, product, product.where)
        gradient.register(product.op, derived_gradient(product), product.where)
        local_attrs.register(product.op, _with_extents, product.where)
    return _PRODUCTS[name]


def grad_op(op: Op) -> Op:
    """Return the op that is the gradient of a fused op."""
    return vjp_of(definition.get(op)).op


def derived_gradient(found: FusedOp | Vjp, single: Instruction | None = None) -> Gradient:
    """Return the rule that emits the product of an op, or its ops where it is one instruction."""

    def pull(
        b: GraphBuilder, node: Node, grads: tuple[ValueId | None, ...]
    ) -> tuple[ValueId | None, ...]:
        if single is not None:
            return _by_rule(b, node, single, grads[0])
        return _by_product(b, node, found, grads)

    return pull


def _by_product(
    b: GraphBuilder, node: Node, found: FusedOp | Vjp, grads: tuple[ValueId | None, ...]
) -> tuple[ValueId | None, ...]:
    """Emit the product: one node, or, of an elementwise op, one for each operand.

    The gradients of an elementwise op have the full shape and are summed to that of the operand;
    those that nobody wants are pruned, with what only they read.
    """
    from compiler.ops.primitives.reduce import (
        sum_to,  # in terms of ops that are defined by programs
    )

    product = vjp_of(found)
    types = tuple([b.type_of(v) for v in node.inputs])
    form = found.form(types, node.attrs)
    given = tuple([i for i, g in enumerate(grads) if g is not None])
    gradients: list[ValueId | None] = [None] * len(node.inputs)
    if not given:
        return tuple(gradients)
    pool = [*[g for g in grads if g is not None], *node.inputs, *node.outputs]
    reached = _derived_for(node, found, form, given, float_slots(form)).wanted
    for wanted in [(i,) for i in reached] if form.extents is None else [reached] if reached else []:
        derived = _derived_for(node, found, form, given, wanted)
        attrs = product.outer(form, node.attrs, given, wanted)
        values = b.emit(product.op, [pool[i] for i in derived.operands], attrs)
        for index, value in zip(wanted, values, strict=True):
            gradients[index] = sum_to(b, value, types[index].shape)
    return tuple(gradients)


def _derived_for(
    node: Node, found: FusedOp | Vjp, form: ProgramSignature, given: Ints, wanted: Ints
) -> Derived:
    """Derive for a node. Raises CompileError with its line where a gradient's own formula fails."""
    try:
        return differentiate_program(found, form, node.attrs, given, wanted)
    except OpTypeError as error:
        text = f"{node.source}: the gradient of {node.op} {error}"
        raise CompileError(text) from error.__cause__


class GraphEmitter:
    """Emits instructions as the ops of a graph that are defined by one of them."""

    def __init__(self, b: GraphBuilder) -> None:
        self.b = b

    def op(self, name: str, *operands: ValueId) -> ValueId:
        """Emit the op that is an instruction."""
        return self.b.emit_one(OP_OF_INSTRUCTION[name], *operands)

    def constant_like(self, number: float, value: ValueId) -> ValueId:
        """Emit a number in the dtype of a value."""
        from compiler.ops.primitives.sources import scalar

        return scalar(self.b, number, self.b.type_of(value).dtype)

    def cast(self, value: ValueId, dtype: DType) -> ValueId:
        """Emit a conversion, or nothing where the value has the dtype."""
        from compiler.ops.primitives.shape import cast_to

        return cast_to(self.b, value, dtype)

    def dtype_of(self, value: ValueId) -> DType:
        """Return the element type of a value."""
        return self.b.type_of(value).dtype


def _by_rule(
    b: GraphBuilder, node: Node, instruction: Instruction, dy: ValueId | None
) -> tuple[ValueId | None, ...]:
    """Emit the gradients of an op that is one instruction, by the instruction's rule."""
    from compiler.ops.primitives.reduce import sum_to
    from compiler.ops.primitives.sources import CONSTANT

    gradients: list[ValueId | None] = [None] * len(node.inputs)
    name, emitter = instruction.op, GraphEmitter(b)
    if dy is None or name not in RULES:
        return tuple(gradients)
    operands = [Expression(emitter, node.inputs[i]) for i in instruction.operands]
    arguments = [Expression(emitter, dy), Expression(emitter, node.outputs[0]), *operands]
    if name == "pow" and b.producer_of(node.inputs[1]).op is CONSTANT:
        parts: Adjoints = (power_gradient(*arguments), None)
    else:
        parts = RULES[name](*arguments)
    for index, part in zip(instruction.operands, parts, strict=True):
        if part is not None and b.type_of(node.inputs[index]).dtype.is_float:
            value = sum_to(b, part.value, b.type_of(node.inputs[index]).shape)
            earlier = gradients[index]
            gradients[index] = value if earlier is None else emitter.op("add", earlier, value)
    return tuple(gradients)


def plugin_programs(graph: Graph) -> tuple[str, ...]:
    """Return what ops from outside compute in a graph, forwards and backwards, as text.

    A plan kept on disk is found by it: a body may read numbers of other files than its own.
    """
    programs: dict[str, None] = {}
    for node in graph.nodes:
        fused = definition.get(node.op) if definition.has(node.op) else None
        if fused is not None and fused.traces_at_once:
            types = tuple([graph.types[v] for v in node.inputs])
            form = fused.form(types, node.attrs)
            outputs = tuple(range(len(form.outputs)))
            backward = _derived_for(node, fused, form, outputs, float_slots(form)).program
            programs[f"{node.op} {trace(fused, types, node.attrs)} {backward}"] = None
    return tuple(programs)
