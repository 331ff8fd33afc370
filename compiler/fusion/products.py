"""The vector-Jacobian product of a fused op: a fused op whose program is derived.

That of op `f` is op `f_grad`, defined when it is first asked for; that of `f_grad` is
`f_grad_grad`. An op that is one instruction has no product: its gradient is the instruction's rule,
emitted as ops of the graph, which other ops' gradients then meet and simplify.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler.attrs import Attrs, AttrValue
from compiler.errors import CompileError
from compiler.fusion.builder import ProgramBuilder
from compiler.fusion.define import OP_OF_INSTRUCTION, FusedOp, definition
from compiler.fusion.derivatives import RULES, Adjoints, power_gradient
from compiler.fusion.derive import Derived, Ints, derive, float_slots
from compiler.fusion.expressions import Expression
from compiler.fusion.forms import Form, output_of, register_program, trace
from compiler.fusion.notation import Extents, Signature
from compiler.fusion.program import Instruction, Kind, joined
from compiler.fusion.stated import remembered
from compiler.graph import Graph, GraphBuilder, Node
from compiler.ops.signature import Types, expect_inputs, expect_type
from compiler.registry import Op, OpTypeError, define, free_name, infer_type
from compiler.rules import Gradient, gradient
from compiler.sbp.project import local_attrs
from compiler.types import DType, TensorType, ValueId


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The vector-Jacobian product of a fused op: a fused op whose program is derived.

    Its attributes are those of what it is the product of; `given` of outputs whose gradients come,
    where there are several outputs; `wanted` of operands whose gradients it makes, where these are
    not all float ones; and once, whatever is differentiated how often, `shape` with the extents and
    `integers` with the dtypes of operands of integers.
    """

    op: Op
    of: FusedOp | Product
    depth: int
    where: str

    @property
    def signature(self) -> Signature:
        """That of the op that was written down."""
        return self.of.signature

    def inner(self, attrs: Attrs) -> Attrs:
        """Return the attributes of what this is the product of."""
        own = {self.key("given"), self.key("wanted")}
        own |= {"shape", "integers"} if self.depth == 1 else set()
        return Attrs({k: v for k, v in attrs.items() if k not in own})

    def outer(self, form: Form, attrs: Attrs, given: Ints, wanted: Ints) -> Attrs:
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

    def inner_form(self, dtype: DType, attrs: Attrs) -> Form:
        """Return the form of what this is the product of."""
        if isinstance(self.of, Product):
            return self.of.derived(dtype, self.inner(attrs)).form
        integers = list(attrs["integers"]) if "integers" in attrs else []  # type: ignore[arg-type]  # names
        found: list[TensorType] = []
        extents = self._extents(attrs)
        for spec in self.signature.inputs:
            own = DType.BOOL if spec.elements == "bool" else dtype
            if spec.elements == "int":
                own = DType(integers.pop(0))
            shape = () if extents is None else extents.of(spec.kind or Kind.FULL)
            found.append(TensorType(own, shape))
        return self.of.form(tuple(found), self.inner(attrs))

    def form(self, inputs: Types, attrs: Attrs) -> Form:
        """Return how the operands of a call lie."""
        return self.derived(inputs[0].dtype, attrs).form

    def infer(self, inputs: Types, attrs: Attrs) -> Types:
        """Return the types of the gradients."""
        if not inputs or not inputs[0].dtype.is_float:
            raise OpTypeError("needs the gradient of an output first, of floats")
        form = self.derived(inputs[0].dtype, attrs).form
        expect_inputs(inputs, *[slot.name for slot in form.inputs])
        wide = inputs[0].shape
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
        made = p.replay(self.derived(p.dtype_of(values[0]), attrs).program, values)
        wide = joined([p.kind_of(v) for v in values])
        if extents is None:
            return tuple([output_of(p, Expression(p, v), wide) for v in made])
        return made

    def _extents(self, attrs: Attrs) -> Extents | None:
        if self.signature.is_elementwise:
            return None
        shape = attrs.ints("shape")
        cut = len(shape) - len(self.signature.axes)
        return Extents(shape[:cut], shape[cut:])

    def key(self, name: str) -> str:
        """Return the name of an attribute of this product, beside those of inner ones."""
        return name if self.depth == 1 else f"{name}{self.depth}"


def _stretches(shape: Ints, wide: Ints) -> bool:
    """Whether numpy's rule stretches a shape to a wide one."""
    last = wide[len(wide) - len(shape) :]
    return len(shape) <= len(wide) and all([n in (1, m) for n, m in zip(shape, last, strict=True)])


@remembered(512)
def _derived(product: Product, dtype: DType, attrs: Attrs) -> Derived:
    form = product.inner_form(dtype, attrs)
    given = _ints(attrs, product.key("given"), tuple(range(len(form.outputs))))
    wanted = _ints(attrs, product.key("wanted"), float_slots(form))
    return derive(product.of, form, product.inner(attrs), given, wanted)


def _ints(attrs: Attrs, key: str, default: Ints) -> Ints:
    return attrs.ints(key) if key in attrs else default


_PRODUCTS: dict[str, Product] = {}
"""By the name of what they are products of."""


def _with_extents(attrs: Attrs, shape: tuple[int, ...]) -> Attrs:
    return Attrs({**attrs, "shape": shape}) if "shape" in attrs else attrs


def product_of(found: FusedOp | Product) -> Product:
    """Return the vector-Jacobian product of a fused op, defined at the first call."""
    name = found.op.name
    if name not in _PRODUCTS:
        depth = found.depth + 1 if isinstance(found, Product) else 1
        op = define(free_name(f"{name}_grad"))
        made = _PRODUCTS[name] = Product(op, found, depth, found.where)
        infer_type.register(made.op, remembered(1024)(made.infer), made.where)
        register_program(made.op, made, made.where)
        gradient.register(made.op, derived_gradient(made), made.where)
        local_attrs.register(made.op, _with_extents, made.where)
    return _PRODUCTS[name]


def grad_op(op: Op) -> Op:
    """Return the op that is the gradient of a fused op."""
    return product_of(definition.get(op)).op


def derived_gradient(found: FusedOp | Product, single: Instruction | None = None) -> Gradient:
    """Return the rule that emits the product of an op, or its ops where it is one instruction."""

    def pull(
        b: GraphBuilder, node: Node, grads: tuple[ValueId | None, ...]
    ) -> tuple[ValueId | None, ...]:
        if single is not None:
            return _by_rule(b, node, single, grads[0])
        return _by_product(b, node, found, grads)

    return pull


def _by_product(
    b: GraphBuilder, node: Node, found: FusedOp | Product, grads: tuple[ValueId | None, ...]
) -> tuple[ValueId | None, ...]:
    """Emit the product: one node, or, of an elementwise op, one for each operand.

    The gradients of an elementwise op have the full shape and are summed to that of the operand;
    those that nobody wants are pruned, with what only they read.
    """
    from compiler.ops.reduce import sum_to  # in terms of ops that are defined by programs

    product = product_of(found)
    types = tuple([b.type_of(v) for v in node.inputs])
    form = found.form(types, node.attrs)
    given = tuple([i for i, g in enumerate(grads) if g is not None])
    result: list[ValueId | None] = [None] * len(node.inputs)
    if not given:
        return tuple(result)
    pool = [*[g for g in grads if g is not None], *node.inputs, *node.outputs]
    reached = _derived_for(node, found, form, given, float_slots(form)).wanted
    for wanted in [(i,) for i in reached] if form.extents is None else [reached] if reached else []:
        derived = _derived_for(node, found, form, given, wanted)
        attrs = product.outer(form, node.attrs, given, wanted)
        made = b.emit(product.op, [pool[i] for i in derived.operands], attrs)
        for index, value in zip(wanted, made, strict=True):
            result[index] = sum_to(b, value, types[index].shape)
    return tuple(result)


def _derived_for(
    node: Node, found: FusedOp | Product, form: Form, given: Ints, wanted: Ints
) -> Derived:
    """Derive for a node. Raises CompileError with its line where a gradient's own formula fails."""
    try:
        return derive(found, form, node.attrs, given, wanted)
    except OpTypeError as error:
        text = f"{node.source}: the gradient of {node.op} {error}"
        raise CompileError(text) from error.__cause__


class GraphEmitter:
    """Emits instructions as the ops of a graph that are defined by one of them."""

    def __init__(self, b: GraphBuilder) -> None:
        self.b = b

    def op(self, name: str, *operands: ValueId) -> ValueId:
        """Emit the op that is an instruction."""
        return self.b.one(OP_OF_INSTRUCTION[name], *operands)

    def constant_like(self, number: float, value: ValueId) -> ValueId:
        """Emit a number in the dtype of a value."""
        from compiler.ops.sources import scalar

        return scalar(self.b, number, self.b.type_of(value).dtype)

    def cast(self, value: ValueId, dtype: DType) -> ValueId:
        """Emit a conversion, or nothing where the value has the dtype."""
        from compiler.ops.elementwise import cast_to

        return cast_to(self.b, value, dtype)

    def dtype_of(self, value: ValueId) -> DType:
        """Return the element type of a value."""
        return self.b.type_of(value).dtype


def _by_rule(
    b: GraphBuilder, node: Node, instruction: Instruction, dy: ValueId | None
) -> tuple[ValueId | None, ...]:
    """Emit the gradients of an op that is one instruction, by the instruction's rule."""
    from compiler.ops.reduce import sum_to
    from compiler.ops.sources import CONSTANT

    result: list[ValueId | None] = [None] * len(node.inputs)
    name, emitter = instruction.op, GraphEmitter(b)
    if dy is None or name not in RULES:
        return tuple(result)
    operands = [Expression(emitter, node.inputs[i]) for i in instruction.operands]
    read = [Expression(emitter, dy), Expression(emitter, node.outputs[0]), *operands]
    if name == "pow" and b.producer_of(node.inputs[1]).op is CONSTANT:
        parts: Adjoints = (power_gradient(*read), None)
    else:
        parts = RULES[name](*read)
    for index, part in zip(instruction.operands, parts, strict=True):
        if part is not None and b.type_of(node.inputs[index]).dtype.is_float:
            value = sum_to(b, part.value, b.type_of(node.inputs[index]).shape)
            earlier = result[index]
            result[index] = value if earlier is None else emitter.op("add", earlier, value)
    return tuple(result)


def foreign_programs(graph: Graph) -> tuple[str, ...]:
    """Return what ops from outside compute in a graph, forwards and backwards, as text.

    A plan kept on disk is found by it: a body may read numbers of other files than its own.
    """
    found: dict[str, None] = {}
    for node in graph.nodes:
        stated = definition.get(node.op) if definition.has(node.op) else None
        if stated is not None and stated.traces_at_once:
            types = tuple([graph.types[v] for v in node.inputs])
            form = stated.form(types, node.attrs)
            every = tuple(range(len(form.outputs)))
            backward = _derived_for(node, stated, form, every, float_slots(form)).program
            found[f"{node.op} {trace(stated, types, node.attrs)} {backward}"] = None
    return tuple(found)
