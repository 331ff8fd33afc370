"""Every function over the range of float16 and float32, held against itself in float64.

In float64 tests/oracle holds it against torch. What does not agree is in EXCEPTIONS, by reason.
"""

import re
import warnings

import pytest
import sweep

ENDS = (1e-30, 1e30)

EXCEPTIONS = {
    "squares of float32 overflow and underflow, as torch's do": (
        "float32",
        "std|norm fro|norm 2|no axes are all.*|layer_norm.*|group_norm|instance_norm|normalize"
        "|local_response_norm|batch_norm in.*|cosine_.*|pairwise_distance|triplet_margin_loss"
        "|gaussian_nll_loss|slope of slope|cumprod|soft_margin_loss|poisson_nll_loss"
        "|margin_ranking_loss|asinh|acosh|SwiGLU|attention.*",
        ENDS,
    ),
    "cubes, too": ("float32", "triplet_margin_loss", (1e-12, 1e12, *ENDS)),
    "products of float32 lose what an attention or a gate differs by": (
        "float32",
        "attention of a.* mask.*|attention of keys that are padding|MultiheadAttention.*"
        "|Transformer.*|rnn.*|gru.*|lstm.*",
        (),
    ),
    "products of float16 overflow before a gate bends them": (
        "float16",
        "rnn.*|gru.*|lstm.*|layers|Transformer.*",
        (),
    ),
    "products of float16 overflow before they are products again": (
        "float16",
        "MultiheadAttention.*|SwiGLU",
        (1e3, 2e4),
    ),
    "the gradient of attention has sum(dy * y) of a y that was rounded, as flash attention's": (
        "float16",
        "attention of a.* mask.*|MultiheadAttention with.* mask.*",
        (40.0, 1e3, 2e4),
    ),
    "its eps is that of the type": ("float.*", "rms_norm", ()),
    "the case adds a number that the type does not tell from its sum": (
        "float.*",
        "batch_norm of values far from 0|binary_cross_entropy",
        (),
    ),
    "differences of nearly equal numbers, in torch's formula": (
        "float.*",
        "softsign|tanhshrink|log_softmax of axis -1|cross_entropy of probabilities",
        (),
    ),
    "the case itself multiplies results, or sums them up, in its type": (
        "float.*",
        "gradients of gradients.*|slope of slope|einsum bm,kn->|cond in cond|nested",
        (),
    ),
    "it reads a result that does not fit": ("float16", "hypot", (2e4,)),
    "its eps is 0 in float16": ("float16", "normalize", (1e-6,)),
}
"""Types and cases as patterns, and the sizes of arguments, all where there are none."""

SMALL = (
    *("std", "norm 2", "norm 3", "logsumexp", "cosine_similarity", "pairwise_distance"),
    *("mse_loss", "huber_loss", "layer_norm of two axes", "group_norm", "instance_norm"),
    *("local_response_norm", "batch_norm in training", "attention", "bilinear", "cumprod"),
)
"""What every tier sweeps, in float16 at its ends."""

CASES = {case.name: case for case in sweep.cases()}
CASES_BY_PART = [list(CASES)[part::12] for part in range(12)]


def swept_sizes(name, dtype):
    """Return the sizes of a case that no exception is about."""
    about = [
        sizes
        for of, names, sizes in EXCEPTIONS.values()
        if re.fullmatch(of, dtype) and re.fullmatch(names, name)
    ]
    return [s for s in sweep.SIZES[dtype] if all(sizes and s not in sizes for sizes in about)]


def faults(names, dtype, ends=None):
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, where float64 overflows too
        for name in names:
            sizes = [s for s in swept_sizes(name, dtype) if ends is None or s in ends]
            found += sweep.faults(CASES[name], dtype, sizes) if sizes else []
    return found


@pytest.mark.usefixtures("numpys_kernels")
def test_reductions_norms_and_attention_of_float16_fit_where_their_results_do():
    found = faults(SMALL, "float16", (1e-3, 2e4))
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.timeout(900)  # each case is compiled in two types
@pytest.mark.usefixtures("native")
def test_native_kernels_of_float16_fit_where_their_results_do():
    found = faults(SMALL, "float16")
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("numpys_kernels")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("part", range(len(CASES_BY_PART)))
def test_every_function_over_the_range_of_its_type(part, dtype):
    found = faults(CASES_BY_PART[part], dtype)
    assert not found, "\n".join(found)


def test_exceptions_are_of_cases_that_there_are():
    for _, names, sizes in EXCEPTIONS.values():
        for each in names.split("|"):
            assert any(re.fullmatch(each, name) for name in CASES), each
        assert {*sizes} <= {size for own in sweep.SIZES.values() for size in own}
