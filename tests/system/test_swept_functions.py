"""Every function over the range of 16- and 32-bit floats, held against itself in float64.

In float64 tests/oracle holds it against torch. What does not agree is in EXCEPTIONS, by reason.
numpy's kernels run every case in every type. Native ones and those of an emulated GPU share the
cases, each in one type; ACTORFLOW_SWEEP=whole runs all.
"""

import os
import re
import warnings

import pytest
import sweep

WHOLE = os.environ.get("ACTORFLOW_SWEEP") == "whole"

WIDE = "float32|bfloat16"
"""Types with the range of float32."""

EXCEPTIONS = {
    "squares and products overflow before they are rooted, bent or divided": [
        (
            WIDE,
            "norm fro|norm 2|no axes are all, .*|layer_norm.*|rms_norm|group_norm|instance_norm"
            "|normalize|local_response_norm|batch_norm (in|of).*|cosine_.*|pairwise_distance"
            "|triplet_margin_loss|cumprod|SwiGLU|attention.*|MultiheadAttention.*|Transformer.*"
            "|rnn.*|gru.*|lstm.*|slope of slope|gradients of gradients of pools"
            "|weight_norm.*|spectral_norm.*|Cosine.*|matrix_norm|cdist 2.0|qr|svd|pinv",
            (1e30,),
        ),
        ("float16", "SwiGLU|MultiheadAttention.*|Transformer.*", (1e3, 2e4)),
        ("float16", "Transformer.*", (40.0,)),
        ("float16", "layers|einsum bm,kn->|hypot", (2e4,)),
        ("float16", "weight_norm of Conv.*|spectral_norm.*", (2e4,)),  # gradients of the weight do
    ],
    "they underflow": [
        (WIDE, "norm fro|norm 2|no axes are all, .*|rnn|weight_norm.*|spectral_norm.*", (1e-30,)),
        (WIDE, "matrix_norm|cdist 2.0|svd", (1e-30,)),
        (WIDE, "TransformerEncoder|TransformerDecoder|Transformer", (1e-12,)),
        ("float16", "normalize", (1e-6,)),  # its eps does
    ],
    "differences of numbers that are nearly equal: of products, or in torch's formula": [
        (WIDE, "MultiheadAttention.*|Transformer.*", (1e12,)),
        (WIDE, "TransformerDecoderLayer", (1e4,)),
        ("float32", "attention of keys that are padding", (1.0,)),
        (WIDE, "MultiheadAttention.*|tanhshrink", (1e-4,)),
        (WIDE, "MultiheadAttention.*|cross_entropy of probabilities", (1e-12,)),
        ("float32", "cross_entropy of probabilities", (1e-4,)),
        ("float32", "poisson_nll_loss", (1e30,)),
        (WIDE, "grid_sample bicubic", (1e-30, 1e-12, 1e-4, 1e4, 1e12, 1e30)),  # of equal pixels
        ("float16", "grid_sample bicubic", (40.0, 1e3, 2e4)),
        ("float32", "log_softmax of axis -1", (1e-30, 1e-12)),
    ],
    "its eps is that of the type": [(".*", "rms_norm", (1e-30, 1e-12, 1e-6, 1e-4, 1e-3))],
    "the case adds a number that the type does not tell from its sum": [
        (".*", "batch_norm of values far from 0", (1e-12, 1e-6, 1e-4)),
        ("float32", "triplet_margin_loss", (1e-12,)),
        (WIDE, "grid_sample (of solids )?bilinear", (1e-12, 1e12)),  # a pixel's middle to its place
        ("float16", "grid_sample (of solids )?bilinear", (1e-6,)),
    ],
    "the case itself multiplies results, or sums them up, in its type": [
        ("float16", "gradients of gradients", (1.0,)),
        ("float16", "gradients of gradients of pools|slope of slope", (1e3, 2e4)),
        ("float16", "rnn (of scan|in reverse|recomputed)|lstm of scan", (1e3, 2e4)),
        ("float16", "cond in cond", (1e-6,)),
        ("float16", "transforms of images", (2e4,)),
        ("float16", "nested", (40.0, 1e3)),
    ],
}
"""Types and cases as patterns, and the sizes of arguments, by reason."""

ROWS = [row for rows in EXCEPTIONS.values() for row in rows]

SMALL = (
    *("std", "norm 2", "norm 3", "logsumexp", "cosine_similarity", "pairwise_distance"),
    *("mse_loss", "huber_loss", "layer_norm of two axes", "group_norm", "instance_norm"),
    *("local_response_norm", "batch_norm in training", "attention", "bilinear of tables"),
    *("cumprod", "gru cell"),
)
"""What every tier sweeps, in float16 at its ends."""

CASES = {case.name: case for case in sweep.cases()}
CASES_BY_PART = [list(CASES)[part::12] for part in range(12)]

CELLS = [(dtype, kernels) for kernels in ("numpy", "native", "cuda") for dtype in sweep.SIZES]


def swept_sizes(name, dtype):
    """Return the sizes of a case that no exception is about."""
    excepted = {
        size
        for types, names, sizes in ROWS
        if re.fullmatch(types, dtype) and re.fullmatch(names, name)
        for size in sizes
    }
    return [size for size in sweep.SIZES[dtype] if size not in excepted]


def faults(names, dtype, ends=None, **options):
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, where float64 overflows too
        for name in names:
            if "gpu" in options and CASES[name].no_gpu:
                continue
            sizes = [s for s in swept_sizes(name, dtype) if ends is None or s in ends]
            found += sweep.faults(CASES[name], dtype, sizes, **options) if sizes else []
    return found


@pytest.mark.usefixtures("numpys_kernels")
def test_reductions_norms_and_attention_of_float16_fit_where_their_results_do():
    found = faults(SMALL, "float16", (1e-3, 2e4))
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.timeout(900)  # each case is compiled in two types
@pytest.mark.parametrize(("dtype", "options"), CELLS, indirect=["options"])
@pytest.mark.parametrize("part", range(len(CASES_BY_PART)))
def test_every_function_over_the_range_of_its_type(part, dtype, options, request):
    names, shared = CASES_BY_PART[part], CELLS[len(sweep.SIZES) :]
    cell = dtype, request.node.callspec.params["options"]
    if cell in shared and not WHOLE:
        names = names[shared.index(cell) :: len(shared)]
    found = faults(names, dtype, **options)
    assert not found, "\n".join(found)


def test_exceptions_are_of_cases_that_there_are():
    for _, names, sizes in ROWS:
        for each in re.split(r"\|(?![^(]*\))", names):
            assert any(re.fullmatch(each, name) for name in CASES), each
        assert {*sizes} <= {size for own in sweep.SIZES.values() for size in own}
