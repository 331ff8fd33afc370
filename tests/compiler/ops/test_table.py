"""Each row of the table of ops: types, reference, gradient, and kernels on every path."""

from __future__ import annotations

from functools import cache

import numpy as np
import op_table as table
import pytest
import tiers
from element_rows import ROWS_OF_ELEMENTS
from emulated_run import emulated_run
from graph_oracles import pull, slopes, walked
from kernel_calls import GUARD, bind_to, garbage, launched_op, needs_of
from kernel_calls import strided as laid_out
from program_texts import texts_of
from small_blocks import cut_small

from actors.kernels.common.kernel import Operand
from actors.kernels.cuda import catalogue as cuda
from actors.kernels.host import catalogue
from actors.testing.emulated import kernels as emulated_kernels
from compiler.contract.attrs import Attrs
from compiler.contract.types import DType, TensorType, from_bits, numpy_dtype, to_bits
from compiler.fusion import fuse
from compiler.graph.graph import GraphBuilder, Output, gradient
from compiler.graph.program_builder import expand
from compiler.graph.registry import Op, cost, find_op, infer_type, is_source, reference, view
from compiler.ops.primitives.sources import INPUT
from compiler.ops.primitives.transfer import is_copy
from compiler.pipeline import standard_ops

ROWS = (*table.ROWS_OF_OPS, *ROWS_OF_ELEMENTS)
LOW = DType.BFLOAT16
ELSEWHERE = {
    "over_stages": "between ranks; tests/compiler/sbp/test_cut.py",
    **dict.fromkeys(("send", "receive"), "between ranks; tests/actors/collectives"),
    "constant": "tests/compiler/ops/test_ops.py",
    **dict.fromkeys(
        ["cholesky", "det", "eigh", "fft", "qr", "slogdet", "solve", "svd"],
        "libraries compute them; tests/oracle/test_linear_algebra.py",
    ),
    "fused": "made of the others; tests/actors/kernels/native",
    "region": "made of the others; tests/actors/kernels/test_regions.py",
    "cond": "its functions are attributes; tests/oracle/test_scan.py",
    "while": "its functions are attributes; tests/actorflow/functional/test_control.py",
    "scan": "its function is an attribute; tests/oracle/test_scan.py",
    "lamb_update": "made of others, as are two more; tests/compiler/passes/test_stage_updates.py",
    "adafactor_update": "tests/compiler/passes/test_stage_updates.py",
    "adafactor_vector_update": "tests/compiler/passes/test_stage_updates.py",
    "muon_update": "tests/compiler/passes/test_stage_updates.py",
    "joined_updates": "made of the others; tests/actors/kernels/cuda/test_joined_updates.py",
}
"""Ops that have a reference and no row, and where they are tested instead."""


def named(rows):
    """Return the rows with names: of equal ops the second is called "add 2", and so on."""
    seen = {}
    for row in rows:
        seen[row.op] = seen.get(row.op, 0) + 1
        yield pytest.param(row, id=f"{row.op} {seen[row.op]}" if seen[row.op] > 1 else row.op)


def first_of(op):
    """Return the first row of an op: the one that has nothing special about it."""
    return next(row for row in ROWS if row.op == op)


def rows_of(column):
    """Return a decorator that runs a test for each row whose op has a cell in a column."""
    found = [row for row in ROWS if column.has(find_op(row.op))]
    if column is gradient:  # a formula that rounds has no slope
        found = [row for row in found if "rounds" not in row.flags]
    return pytest.mark.parametrize("row", tuple(named(found)))


every_row = pytest.mark.parametrize("row", tuple(named(ROWS)))
SHARE = 2


def sampled(rows):
    """Return rows with names, and a mark on all that are not the first of their op."""
    for named_row in named(rows):
        (row,) = named_row.values
        marks = () if row is first_of(row.op) else pytest.mark.thinned(SHARE)
        yield pytest.param(row, id=named_row.id, marks=marks)


sampled_row = pytest.mark.parametrize("row", tuple(sampled(ROWS)))
"""Each row, in tests that start the C compiler: of an op's rows after the first, which differ in
attributes, types or extents, `merge` runs one in `SHARE`."""


def types_of(arrays):
    return tuple(TensorType(DType(str(a.dtype)), tuple(a.shape)) for a in arrays)


@every_row
def test_the_reference_gives_the_formula_in_arrays_of_the_inferred_types(row):
    op, attrs = find_op(row.op), Attrs(row.attrs)
    inferred = infer_type.get(op)(types_of(row.inputs), attrs)
    before = [a.copy() for a in row.inputs]
    with np.errstate(all="ignore"):
        made = reference.get(op)(attrs, *row.inputs)
    assert [np.shape(y) for y in made] == [t.shape for t in inferred]
    for y, type_, expected in zip(made, inferred, row.outputs(row.inputs), strict=True):
        assert np.asarray(y).dtype == type_.dtype.value
        assert not any(np.shares_memory(y, a) for a in row.inputs)
        np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_equal(list(row.inputs), before)
    work = cost.get(op)(types_of(row.inputs), inferred, attrs)
    assert min(work.flops, work.bytes) >= 0


class Traced:
    """A row as a graph; with `is_slope` also the gradients of a weighted sum of output 0.

    Inputs of float64 get the dtype; the others keep theirs.
    """

    def __init__(self, row, dtype, is_slope=True):
        self.row, self.dtype = row, dtype
        self.is_float = [a.dtype == np.float64 for a in row.inputs]
        b = GraphBuilder()
        kinds = [dtype.value if f else str(a.dtype) for a, f in self.each(row.inputs)]
        inputs = [
            b.emit_one(INPUT, name=str(i), dtype=kind, shape=a.shape)
            for i, (a, kind) in enumerate(zip(row.inputs, kinds, strict=True))
        ]
        made = b.emit(find_op(row.op), inputs, row.attrs)
        self.num_outputs, self.has_slope = len(made), [False] * len(inputs)
        grads = self.gradients(b, inputs, made[0]) if is_slope else {}
        self.has_slope = [v in grads for v in inputs]
        outputs = [*made, *[grads[v] for v in inputs if v in grads]]
        b.outputs = [Output(str(i), v) for i, v in enumerate(outputs)]
        self.graph = b.freeze()

    def each(self, arrays):
        return zip(arrays, self.is_float, strict=True)

    def gradients(self, b, inputs, output):
        type_ = b.type_of(output)
        if not gradient.has(find_op(self.row.op)) or not type_.dtype.is_float:
            return {}
        seed = b.emit_one(INPUT, name="dy", dtype=type_.dtype.value, shape=type_.shape)
        grads = pull(b, list(b.nodes)[:-1], {output: seed})
        return {v: grads[v] for v in inputs if v in grads}

    def weights(self):
        """Return what the gradients weigh output 0 with."""
        shape = np.shape(self.row.outputs(self.row.inputs)[0])
        return table.normal(*shape, seed=9)

    def fed(self):
        """Return what the graph's inputs take, rounded to their types; bfloat16 as its bits."""
        given = dict(enumerate((*self.row.inputs, self.weights())))
        feeds = {}
        for node in self.graph.nodes:
            if node.op is INPUT:
                name, dtype = node.attrs["name"], DType(node.attrs["dtype"])
                array = given[len(given) - 1 if name == "dy" else int(name)]
                numbers = np.array(array, "f4" if dtype is LOW else dtype.value)
                feeds[name] = to_bits(numbers) if dtype is LOW else numbers
        return feeds


def by_reference(graph, feeds):
    """Return the outputs of a graph, node by node with the references."""
    with np.errstate(all="ignore"):
        held = walked(graph.nodes, feeds)
    return [held[o.value] for o in graph.outputs]


@rows_of(gradient)
def test_the_gradient_is_the_slope_of_the_formula(row):
    traced = Traced(row, DType.FLOAT64)
    results = by_reference(traced.graph, traced.fed())[traced.num_outputs :]
    grads = dict(zip(np.flatnonzero(traced.has_slope), results, strict=True))
    weights = traced.weights()

    def objective(arrays):
        return np.sum(weights * row.outputs(tuple(arrays))[0])

    for index, expected in slopes(objective, row.inputs):
        got = grads.get(index, 0.0)
        expected = 0.0 * expected if "constant" in row.flags else expected
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def by_launches(graph, feeds, op):
    """Return the outputs of a graph on the host's kernels; views of others than `op` are copied.

    Every launch runs twice in scratch that holds garbage, then with other numbers in the same
    places, then over each input that its kernel offers to lie over, with the same bits.
    """
    held = {}
    for node in graph.nodes:
        inputs = [held[v] for v in node.inputs]
        types = [graph.types[v] for v in node.outputs]
        if node.op is INPUT:
            made = [feeds[node.attrs["name"]]]
        elif not catalogue.kernels_for(launched_op(node.op)) or (
            view.has(node.op) and node.op is not op
        ):
            made = by_own_reference(node, inputs, types)
        else:
            given = [graph.types[v] for v in node.inputs]
            made = launched(node, given, inputs, types)
        held.update(zip(node.outputs, made, strict=True))
    return [held[o.value] for o in graph.outputs]


@rows_of(expand)
def test_an_op_with_a_program_becomes_one_that_means_the_same(row):
    traced = Traced(row, DType.FLOAT64)
    fused = fuse.run(traced.graph)
    if row is first_of(row.op) or "fused" in row.flags:
        assert row.op not in {n.op.name for n in fused.nodes}
    results = by_reference(fused, traced.fed()), by_reference(traced.graph, traced.fed())
    for got, expected in zip(*results, strict=True):
        assert np.asarray(got).dtype == np.asarray(expected).dtype
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-12)


def empty(types):
    """Return arrays for results, of a number that shows where a kernel leaves a hole."""
    return [np.full(t.shape, 77, numpy_dtype(t.dtype)) for t in types]


def operands_of(types, arrays):
    return tuple([Operand(t, 0, a.strides) for t, a in zip(types, arrays, strict=True)])


def launched(node, given, inputs, types):
    """Run a node's kernel as `by_launches` says; also into results that are not dense."""
    made, attrs = empty(types), dict(node.attrs)
    try:
        name, needs = catalogue.select_kernel(
            launched_op(node.op), attrs, operands_of(given, inputs), operands_of(types, made)
        )
    except LookupError:  # as lowering does, copy what no kernel takes where it lies
        inputs = [np.array(a, order="C") for a in inputs]
        name, needs = catalogue.select_kernel(
            launched_op(node.op), attrs, operands_of(given, inputs), operands_of(types, made)
        )
    kernel = catalogue.kernels_by_name()[name]
    for output, index in node.writes:  # it may leave what does not change
        made[output][...] = inputs[index]

    def bind(needs, inputs, outputs):
        space, behind = garbage(needs.workspace_bytes)
        scratch = space if needs.workspace_bytes else None
        bound = bind_to(kernel, attrs, tuple(inputs), tuple(outputs), scratch)

        def launch():
            space[:] = 0xFF
            with np.errstate(divide="ignore", over="ignore"):  # of integers by 0 and -1
                bound()
            assert (behind == GUARD).all()

        return launch

    before = [a.copy() for a in inputs]
    launch = bind(needs, inputs, made)
    launch()
    launch()
    np.testing.assert_equal(inputs, before)
    again, fresh = empty(types), empty(types)
    launch = bind(needs, inputs, again)
    for a, old in zip(inputs, before, strict=True):
        a[...] = others(old)
    with np.errstate(all="ignore"):  # the others may not belong together
        launch()
        bind(needs, inputs, fresh)()
    np.testing.assert_equal(again, fresh)
    for a, old in zip(inputs, before, strict=True):
        a[...] = old
    for output, index in node.writes:
        is_alike = inputs[index].strides == made[output].strides
        assert (output, index) in needs.in_place or not is_alike or name.endswith(".upcast")
    for output, index in needs.in_place:
        shared, outputs = [a.copy() for a in inputs], list(made)
        outputs[output] = shared[index].reshape(made[output].shape)
        bind(needs, shared, outputs)()
        np.testing.assert_array_equal(outputs[output], made[output], f"{name} over input {index}")
    for kind in ("windowed", "transposed"):
        outputs = [strided(a, kind) for a in empty(types)]
        own = needs_of(kernel, attrs, operands_of(given, inputs), operands_of(types, outputs))
        if own is not None:
            launch = bind(own, inputs, outputs)
            launch()
            launch()
            # A library adds up a product in another order where its result lies otherwise.
            near = 1e-5 if "matmul" in name else 0
            for pair in zip(outputs, made, strict=True):
                output, dense = map(widened, pair)
                np.testing.assert_allclose(output, dense, near, near, err_msg=f"{name} {kind}")
    return made


def others(array):
    """Return other numbers that an op takes in their place; of a flag the other one."""
    if array.ndim:
        return np.flip(array)
    return 1 - array if array in (0, 1) else array + 1


def strided(array, kind):
    return laid_out(None, array.shape, array.dtype, kind, array)


@pytest.fixture(params=["numpy", "native"])
def path(request):
    """numpy's kernels, or those of C where there are some."""
    if request.param == "native":
        request.getfixturevalue("native")
    return request.param


def dtypes_of(row):
    """Return the types to run a row in: all for the first of an op, as C takes a while."""
    more = (LOW, DType.FLOAT64)[: tiers.size(2, merge=1)]
    return (DType.FLOAT32, *more) if row is first_of(row.op) else (DType.FLOAT32,)


@sampled_row
@pytest.mark.parametrize("path", ["numpy", "native"], indirect=True)
def test_kernels_give_the_formula_and_its_gradient(row, path, monkeypatch):
    wide = Traced(row, DType.FLOAT64)
    for dtype in dtypes_of(row):
        traced = Traced(row, dtype)
        fused, feeds = fuse.run(traced.graph), traced.fed()
        expected = by_reference(wide.graph, {name: widened(a) for name, a in feeds.items()})
        for kind in ("dense", "windowed", "sliced", "transposed", "permuted"):
            if kind == "sliced":
                cut_small(monkeypatch, block_bytes=96, chunk_bytes=64)
            given = {name: strided(a, kind) for name, a in feeds.items()}
            got = by_launches(fused, given, find_op(row.op))
            for place, (y, want) in enumerate(zip(got, expected, strict=True)):
                close(widened(y), want, dtype, "moves" in row.flags and place < traced.num_outputs)


GPU = "h200"


def on_gpu(graph, feeds, toolchain):
    """Return the outputs of a graph on kernels of a GPU, emulated; what has none by its reference.

    Every launch is made in several orders of threads, in poisoned scratch, among guard bytes.
    """
    held = {}
    for node in graph.nodes:
        inputs = [held[v] for v in node.inputs]
        given = [graph.types[v] for v in node.inputs]
        types = [graph.types[v] for v in node.outputs]
        if node.op is INPUT:
            made = [feeds[node.attrs["name"]]]
        else:
            attrs, results = dict(node.attrs), operands_of(types, empty(types))
            try:
                name = chosen_on_gpu(node, attrs, operands_of(given, inputs), results)
            except LookupError:  # as lowering does, copy what no kernel takes where it lies
                inputs = [np.array(a, order="C") for a in inputs]
                name = chosen_on_gpu(node, attrs, operands_of(given, inputs), results)
            if name is None:
                made = by_own_reference(node, [widened(x) for x in inputs], types)
            else:
                made = emulated_run(
                    toolchain,
                    cuda.kernels_by_name(GPU)[name],
                    attrs,
                    tuple(inputs),
                    tuple(types),
                    dtypes=[t.dtype for t in given],
                    in_place=tuple(node.writes),
                ).outputs
        held.update(zip(node.outputs, made, strict=True))
    return [held[o.value] for o in graph.outputs]


def chosen_on_gpu(node, attrs, inputs, outputs):
    """Return the name of a kernel, or None where the op has none. Raises LookupError."""
    op = launched_op(node.op)
    if op not in {kernel.op for kernel in cuda.kernels_by_name(GPU).values()}:
        return None
    return cuda.select_kernel(GPU, op, attrs, inputs, outputs)[0]


def by_own_reference(node, inputs, types):
    arrays = reference.get(node.op)(node.attrs, *inputs)
    return [
        to_bits(np.asarray(a, "f4")) if t.dtype is LOW and a.dtype != np.uint16
        else np.array(a).astype(numpy_dtype(t.dtype))
        for a, t in zip(arrays, types, strict=True)
    ]  # fmt: skip


PORTIONS = 8
"""Starts of the compiler for kernels of a GPU: one for each row takes longer, one at all too long
for a test."""


@pytest.fixture(scope="module")
def built_for_gpu(native_toolchain):
    """Return a function that builds the programs of a row, and those of its portion of the rows."""

    @cache
    def build(portion):
        programs = {}
        for place in range(portion, len(ROWS), PORTIONS):
            row = ROWS[place]
            if row is not first_of(row.op) and place % tiers.size(1, merge=SHARE):
                continue  # its test is not run
            for dtype in dtypes_of(row):
                for node in fuse.run(Traced(row, dtype).graph).nodes:
                    if "program" in node.attrs and node.op.name != "region":
                        programs[node.attrs["program"]] = None
        texts = [text for p in programs for text in texts_of(p, is_cut=False)]
        emulated_kernels.load([text for text in texts if text.kernels], native_toolchain)

    def of(row):
        build(next(i for i, other in enumerate(ROWS) if other is row) % PORTIONS)
        return native_toolchain

    return of


@sampled_row
def test_kernels_of_a_gpu_give_the_formula_and_its_gradient(row, built_for_gpu):
    toolchain = built_for_gpu(row)
    wide = Traced(row, DType.FLOAT64)
    for dtype in dtypes_of(row):
        traced = Traced(row, dtype)
        fused, feeds = fuse.run(traced.graph), traced.fed()
        expected = by_reference(wide.graph, {name: widened(a) for name, a in feeds.items()})
        got = on_gpu(fused, feeds, toolchain)
        for place, (y, want) in enumerate(zip(got, expected, strict=True)):
            close(widened(y), want, dtype, "moves" in row.flags and place < traced.num_outputs)


def without_kernel_on_gpu(row, dtype):
    """Return the ops of a row's graph that are launches, and that no kernel of a GPU takes."""
    found = []
    graph = fuse.run(Traced(row, dtype).graph)
    for node in graph.nodes:
        if is_source.get(node.op) or (
            view.has(node.op) and not catalogue.kernels_for(node.op.name)
        ):
            continue
        inputs, outputs = [
            operands_of(types, empty(types))
            for types in (
                [graph.types[v] for v in node.inputs],
                [graph.types[v] for v in node.outputs],
            )
        ]
        op = "copy" if is_copy(node) else launched_op(node.op)
        given = inputs[:1] if is_copy(node) else inputs
        try:
            cuda.select_kernel(GPU, op, dict(node.attrs), given, outputs)
        except LookupError as error:
            found.append(f"{node.op} in {dtype}: {error}")
    return found


@every_row
def test_a_gpu_has_a_kernel_for_every_launch_in_floats_of_every_width(row):
    for dtype in (DType.FLOAT16, LOW, DType.FLOAT32, DType.FLOAT64):
        assert without_kernel_on_gpu(row, dtype) == []


def widened(array):
    """Return floats of any type as float64; bits are bfloat16."""
    array = from_bits(array) if array.dtype == np.uint16 else array
    return array.astype(np.float64) if array.dtype.kind == "f" else array


TOLERANCE = {"float64": 1e-13, "float32": 3e-6, "bfloat16": 3e-2}


def close(got, want, dtype, is_exact):
    if is_exact or want.dtype.kind != "f":
        np.testing.assert_array_equal(got, want)
        return
    scale = max(1.0, float(np.abs(want[np.isfinite(want)]).max(initial=0)))
    limit = TOLERANCE[dtype.value]
    np.testing.assert_allclose(got, want, rtol=limit, atol=limit * scale)


def shipped_ops():
    """Return the ops of the standard families; other tests may have defined more."""
    families = standard_ops.FAMILIES
    found = {op for family in families for op in vars(family).values() if isinstance(op, Op)}
    return sorted(found, key=str)


def test_every_op_has_a_row_or_is_only_the_gradient_of_one_that_has():
    covered = {row.op for row in ROWS}
    for row in ROWS:
        covered |= {node.op.name for node in Traced(row, DType.FLOAT64).graph.nodes}
    missing = [op.name for op in shipped_ops() if reference.has(op) and op.name not in covered]
    assert sorted({*missing} - {*ELSEWHERE}) == []
