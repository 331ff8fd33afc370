"""Kernels of ops, on every target, in every type and layout that it takes, against one formula.

A cell is an op on a target in a type and a layout. All kernels of the op are tried on all of its
problems: who takes one is right, gives the same bits in another order of threads, and over each
input that it offers. The table says which cells must be taken, so that none is lost in silence.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import kernel_problems as problems
import numpy as np
import pytest
from error_texts import raises
from kernel_calls import Declined, fused
from kernel_targets import TARGETS, Target, hold
from library_products import skip_without

from compiler.contract.types import DType, TensorType

HALVES, SINGLE, DOUBLE = ("float16", "bfloat16"), ("float32",), ("float32", "float64")
FLOATS = (*HALVES, *DOUBLE)
WIDE = ("int32", "int64")
INTEGERS = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
OFTEN = ("dense", "transposed", "sliced", "permuted", "broadcast")
OUT = ("dense", "transposed", "windowed")
ANY = {"float32": 1e-5, "float64": 1e-12, "float16": 2e-3, "bfloat16": 2e-2}
ONCE = {"float32": 6e-8, "float64": 1e-13, "float16": 2**-11, "bfloat16": 2**-8}
"""Sums in float64 that are rounded once."""


GAPPED = ("dense", "windowed", "permuted")


class Cells(NamedTuple):
    """Ops with the same problems: `taken` has the types of each target, and the layouts."""

    ops: tuple[str, ...]
    problems: object
    taken: dict[str, tuple[tuple[str, ...], tuple[str, ...]]]
    error: dict[str, float]
    outputs: tuple[str, ...] = ("dense",)
    few: int | None = None
    """How many problems of a GPU are tried in layouts but the first: emulation takes a while."""


REDUCED = {
    "numpy": ((*FLOATS, *INTEGERS), OFTEN),
    "c": ((*DOUBLE, *WIDE), ("dense",)),
    "cuda": ((*FLOATS, *INTEGERS), OFTEN),
}
ROUNDED = {
    "float32": 1e-6,
    "cuda float32": 1e-7,
    "float64": 1e-14,
    "float16": 6e-4,
    "bfloat16": 2**-8,
}
CONVOLVED = {
    "numpy": (DOUBLE, ("own",)),
    "c": (("float32", "bfloat16"), ("own",)),
    "cuda": (FLOATS, ("own",)),
}
POOLED = {"numpy": (DOUBLE, ("own",)), "c": (DOUBLE, ("own",)), "cuda": (FLOATS, ("own",))}
MOVED = ("uint8", "bool", "float16", "bfloat16", "float32", "float64", "int64")
KINDS = ("dense", "transposed", "sliced", "windowed", "permuted", "broadcast")

TABLE = {
    "sums": Cells(("sum",), problems.reductions, REDUCED, ROUNDED),
    "maxima": Cells(("max",), problems.reductions, REDUCED, dict.fromkeys(ROUNDED, 0)),
    "means": Cells(
        ("mean",),
        problems.reductions,
        {t: (FLOATS if t != "c" else DOUBLE, kinds) for t, (_, kinds) in REDUCED.items()},
        ROUNDED,
    ),
    "long reductions": Cells(
        ("sum", "mean", "max"),
        problems.long_reductions,
        {t: (SINGLE, ("dense", "sliced", "transposed")[: 1 if t == "c" else 3]) for t in TARGETS},
        {"float32": 1e-6},
    ),
    "gathers": Cells(
        ("embedding",),
        problems.gathers,
        {
            "numpy": (FLOATS, ("dense", "windowed", "permuted", "sliced")),
            "c": (("float16", *DOUBLE), ("dense", "windowed")),
            "cuda": (FLOATS, ("dense", "windowed", "permuted", "sliced")),
        },
        dict.fromkeys(FLOATS, 0),
        OUT,
    ),
    "sums of rows": Cells(
        ("embedding_grad",),
        problems.sums_of_rows,
        {t: (FLOATS if t == "cuda" else DOUBLE, GAPPED) for t in TARGETS},
        ONCE,
    ),
    "updates of rows": Cells(
        ("embedding_update",), problems.updates_of_rows,
        {t: (DOUBLE if t != "cuda" else ("float16", *DOUBLE), ("dense",)) for t in TARGETS},
        {"float32": 2e-7, "float64": 1e-13, "float16": 2**-9},
    ),
    "puts of rows": Cells(
        ("put_rows",),
        problems.puts_of_rows,
        {
            "numpy": (MOVED, KINDS),
            "c": (MOVED, ("dense",)),
            "cuda": (MOVED, KINDS),
        },
        dict.fromkeys(FLOATS, 0),
        few=15,
    ),
    "many axes": Cells(
        (
            *("sum", "mean", "max", "argsort", "recurrence"),
            *("embedding", "embedding_grad", "embedding_update", "last_place", "put_rows"),
        ),
        problems.many_axes,
        dict.fromkeys(("numpy", "cuda"), (SINGLE, ("reversed",))),
        {"float32": 1e-6},
    ),
    "attention": Cells(
        ("attention", "attention_grad"),
        problems.attentions,
        {
            "numpy": ((*DOUBLE, "bfloat16"), (*OFTEN[:-1], "turned")),
            "c": (("float32", "bfloat16"), ("dense", "windowed", "apart", "turned")),
            "cuda": (FLOATS, ("dense", "transposed", "windowed", "turned")),
        },
        ANY | {"c bfloat16": 1e-2},
        ("dense", "turned"),
        few=8,
    ),
    "masked attention": Cells(
        ("attention", "attention_grad"),
        problems.masked_attentions,
        {
            "numpy": ((*DOUBLE, "bfloat16"), ("dense",)),
            "c": (("float32", "bfloat16"), ("dense",)),
            "cuda": (("bfloat16", *DOUBLE), ("dense",)),
        },
        ANY,
    ),
    "products": Cells(
        ("matmul",),
        problems.products,
        {
            "numpy": ((*DOUBLE, "bfloat16"), ("own",)),
            "c": (DOUBLE, ("own",)),
            "cuda": (FLOATS, ("own",)),
        },
        ANY,
        ("dense", "transposed", "windowed", "sliced"),
    ),
    "cut products": Cells(
        ("matmul",),
        problems.cut_products,
        {"c": ((*DOUBLE, "bfloat16"), ("own",))},
        {"float32": 1e-6, "float64": 1e-15, "bfloat16": 2**-8},
        ("dense", "windowed"),
    ),
    "sums that stay wide": Cells(
        ("matmul",),
        problems.wide_products,
        dict.fromkeys(TARGETS, (("bfloat16",), ("own",))),
        {"bfloat16": 1e-5},
        ("dense", "windowed"),
    ),
    "convolutions": Cells(
        ("conv", "conv_input_grad", "conv_weight_grad"), problems.convolutions, CONVOLVED,
        {"float32": 1e-5, "float64": 1e-12, "float16": 3e-3, "bfloat16": 2e-2},
        ("dense", "windowed", "last"),
    ),
    "pools": Cells(("max_pool", "max_pool_grad", "max_pool_pick"), problems.pools, POOLED,
                   {"float32": 1e-6, "float64": 1e-14, "float16": 2e-3, "bfloat16": 2e-2}),
    "moves": Cells(
        ("copy", "reshape", "pad", "concat"), problems.moves,
        dict.fromkeys(TARGETS, (MOVED, KINDS)), dict.fromkeys(FLOATS, 0), OUT,
    ),
}  # fmt: skip


LEFT = {
    "sums": 18, "maxima": 12, "means": 18, "long reductions": 8, "convolutions": 49, "products": 40,
    "sums that stay wide": 60,
}  # fmt: skip
"""How many problems of a cell C may leave to numpy: gaps, axes that are apart, tiny windows.

oneDNN takes three convolutions fewer on a processor without AVX-512.
"""


OF_CUDNN = {"attention": HALVES, "convolutions": (*HALVES, "float32")}
"""What the library takes, beside the kernels of our own, which take all."""

AS_THEY_ARE = ("moves", "pools", "long reductions", "updates of rows", "many axes")
"""What is not cut, or whose blocks have an extent of their own."""


def cells():
    for name, row in TABLE.items():
        for op, (target, (dtypes, kinds)) in itertools.product(row.ops, row.taken.items()):
            for dtype, kind in itertools.product(dtypes, kinds):
                cell = name, op, target, dtype, kind
                if kind != "dense" and dtype in INTEGERS[:2] + INTEGERS[3:] and name != "moves":
                    continue  # as int32
                is_cut = kind == kinds[0] and name not in AS_THEY_ARE
                is_cut &= dtype in ("uint8", "int32", "float32", "bfloat16")
                is_cut &= (name, target, dtype) != ("masked attention", "cuda", "bfloat16")
                for size in ("usual", "tiny")[: 1 + is_cut]:
                    yield pytest.param(*cell, size, id="-".join((*cell, size)))


def machine_of(target, request):
    fixture = {"c": "native", "cuda": "native_toolchain"}.get(target)
    return Target(target, request.getfixturevalue(fixture) if fixture else None)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("name", "op", "target", "dtype", "kind", "sizes"), [*cells()])
def test_a_kernel_gives_the_formula(name, op, target, dtype, kind, sizes, request):
    row = TABLE[name]
    if sizes == "tiny":
        request.getfixturevalue("tiny")
    machine = machine_of(target, request)
    if target == "c" and (op.startswith("conv") or (op, dtype) == ("matmul", "bfloat16")):
        skip_without("onednn", DType(dtype))
    launched = "embedding_sgd_update" if op == "embedding_update" else op
    error, left = row.error.get(f"{target} {dtype}", row.error.get(dtype, 0)), Counter()
    taken = set()
    few = row.few if target == "cuda" and kind != row.taken[target][1][0] else None
    for number, problem in enumerate(itertools.islice(row.problems(launched, dtype, target), few)):
        takers = set()
        for kernel in machine.kernels(op):
            if sizes == "tiny" and kernel.name.startswith("cuda.conv"):
                kernel = replace(kernel, plan=partial(kernel.plan, chunk_bytes=256))
            # An output in another layout with each problem, and dense where that is not taken.
            for out in dict.fromkeys((row.outputs[number % len(row.outputs)], "dense")):
                with contextlib.suppress(Declined):
                    hold(machine, kernel, problem, dtype, error, kind, out)
                    takers.add(kernel.name)
                    break
        taken |= takers
        left[tuple([x.shape for x in problem.inputs])] += not takers
    assert left.total() <= (LEFT.get(name, 0) if target == "c" else 0), left
    if target == "cuda" and few is None and dtype in OF_CUDNN.get(name, ()):
        assert taken == {kernel.name for kernel in machine.kernels(op)}
        assert taken >= {f"cuda.{op}", f"cudnn.{op}"}


BAD_IDS = [(5, "int64"), (-1, "int8"), (2**63 + 1, "uint64")]


@pytest.mark.parametrize("op", ["embedding", "embedding_grad", "embedding_update"])
@pytest.mark.parametrize(("bad", "label"), BAD_IDS)
@pytest.mark.parametrize("target", TARGETS)
def test_the_first_bad_id_is_named_with_its_position(target, bad, label, op, request):
    machine = machine_of(target, request)
    ids = np.zeros((2, 3), label)
    ids[0, 2] = ids[1, 2] = bad
    table, dy, lr = np.ones((5, 2)), np.ones((2, 3, 2)), np.array(1.0)
    arrays = {
        "embedding": (table, ids),
        "embedding_grad": (dy, ids),
        "embedding_update": (table, dy, ids, lr),
    }[op]
    attrs = fused("embedding_sgd_update", {"weight_decay": 0.0}, (table, dy, ids, lr))[1]
    made = TensorType(DType.FLOAT64, (dy if op == "embedding" else table).shape)
    writes = ((0, 0),) if op == "embedding_update" else ()
    types = [DType(x.dtype.name) for x in arrays]
    kernel = machine.all[f"{target}.{op}"]
    with raises(IndexError):
        machine.run(kernel, attrs | {"rows": 5}, types, arrays, [made], in_place=writes)
    if target == "cuda":  # what else there is to do is done
        rest = {"embedding": [1, 1, 0, 1, 1, 0], "embedding_grad": [4, 0, 0, 0, 0]}
        got = machine.left[0][..., 0].reshape(-1)
        np.testing.assert_array_equal(got, rest.get(op, [-3, 1, 1, 1, 1]))
