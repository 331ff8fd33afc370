"""Threads as fibers: what CUDA allows comes out in any order, what it forbids is found."""

import numpy as np
import pytest
from error_texts import raises

from actors.kernels.library.toolchain import CompilerError
from actors.testing.emulated import kernels
from actors.testing.emulated.kernels import EmulationError

SUM = """
    AF_SHARED(double, partial, 32);
    const float *x = (const float *)a[0].p;
    double *out = (double *)a[1].p;
    const int64_t n = a[2].i;
    double s = 0;
    for (int64_t i = AF_THREAD; i < n; i += AF_NUM_THREADS) s += x[AF_BLOCK * n + i];
    for (int32_t mask = 16; mask; mask >>= 1) s += AF_SHUFFLE_XOR_F64(s, mask);
    if (AF_THREAD % 32 == 0) partial[AF_THREAD / 32] = s;
    AF_BARRIER();
    double t = 0;
    for (int32_t w = 0; w < AF_NUM_THREADS / 32; w++) t += partial[w];
    out[AF_BLOCK * AF_NUM_THREADS + AF_THREAD] = t;
"""


def sums(run_text, text, seed, num_blocks=3, num_threads=256, n=1000):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((num_blocks, n)).astype(np.float32)
    out = np.full((num_blocks, num_threads), np.nan)
    run_text(text, (x, out, n), num_blocks, num_threads, seed)
    expected = x.sum(1, dtype=np.float64)[:, None]
    return np.allclose(out, np.broadcast_to(expected, out.shape), rtol=0, atol=1e-9)


def test_a_reduction_over_a_block_is_right_in_every_order(run_text):
    assert all(sums(run_text, SUM, seed) for seed in range(20))


def test_threads_switch_on_any_processor(run_text, monkeypatch):
    monkeypatch.setattr(kernels, "_state", kernels._KernelState())
    monkeypatch.setattr(kernels, "FLAGS", (*kernels.FLAGS, "-DAF_PORTABLE"))
    assert all(sums(run_text, SUM, seed) for seed in range(5))
    with raises(EmulationError):
        run_text("if (AF_THREAD < 5) return; AF_BARRIER();", ())
    assert sums(run_text, SUM, 0)


def test_a_barrier_left_out_of_a_reduction_is_found_in_every_order(run_text):
    wrong = SUM.replace("AF_BARRIER();", "")
    assert not any(sums(run_text, wrong, seed) for seed in range(20))


def test_a_second_reduction_that_reuses_shared_memory_too_early_is_found(run_text):
    twice = SUM.replace(
        "out[AF_BLOCK",
        "if (AF_THREAD % 32 == 0) partial[AF_THREAD / 32] = 0; out[AF_BLOCK",
    )
    assert not any(sums(run_text, twice, seed) for seed in range(20))


@pytest.mark.parametrize("kind", ["I32", "I64", "F32", "F64"])
@pytest.mark.parametrize("mask", [1, 7, 16, 31])
def test_a_shuffle_gives_each_thread_what_its_partner_gave(run_text, kind, mask):
    type_ = {"I32": "int32_t", "I64": "int64_t", "F32": "float", "F64": "double"}[kind]
    numpy_type = {"I32": "i4", "I64": "i8", "F32": "f4", "F64": "f8"}[kind]
    out = np.zeros(96, numpy_type)
    run_text(
        f"(({type_} *)a[0].p)[AF_THREAD] = AF_SHUFFLE_XOR_{kind}(AF_THREAD * 3 - 50, {mask});",
        (out,),
        num_threads=96,
    )
    np.testing.assert_array_equal(out, (np.arange(96) ^ mask) * 3 - 50)


def test_exchanges_one_after_another_do_not_mix(run_text):
    out = np.zeros(64, np.int32)
    run_text(
        """int32_t x = AF_THREAD;
        for (int32_t i = 0; i < 50; i++) x = AF_SHUFFLE_XOR_I32(x, 1 + i % 31) + 1;
        ((int32_t *)a[0].p)[AF_THREAD] = x;""",
        (out,),
    )
    expected = np.arange(64)
    for i in range(50):
        expected = expected[np.arange(64) ^ (1 + i % 31)] + 1
    np.testing.assert_array_equal(out, expected)


def test_all_lanes_see_what_all_lanes_gave(run_text):
    out = np.zeros((64, 32), np.uint64)
    run_text(
        """const uint64_t *all = AF_EXCHANGE_ALL((uint64_t)(AF_THREAD + 7));
        for (int32_t i = 0; i < 32; i++) ((uint64_t *)a[0].p)[AF_THREAD * 32 + i] = all[i];""",
        (out,),
    )
    np.testing.assert_array_equal(out, (np.arange(64) // 32 * 32)[:, None] + np.arange(32) + 7)


def test_shared_memory_means_nothing_when_a_block_begins(run_text):
    out = np.zeros((4, 2), np.int32)
    run_text(
        """AF_SHARED(int32_t, one, 100); AF_SHARED(int32_t, two, 7);
        if (AF_THREAD == 0) {
            int32_t *out = (int32_t *)a[0].p + AF_BLOCK * 2;
            out[0] = one[99]; out[1] = two[6]; one[99] = 5; two[6] = 6;
        }""",
        (out,),
        num_blocks=4,
    )
    np.testing.assert_array_equal(out, np.full((4, 2), -1))


def test_blocks_and_threads_run_in_an_order_of_the_seed(run_text):
    def order(seed):
        out, next_ = np.zeros(8 * 64, np.int32), np.zeros(1, np.int32)
        body = """const int32_t at = AF_ATOMIC_ADD_I32(a[1].p, 1);
        ((int32_t *)a[0].p)[at] = (int32_t)(AF_BLOCK * AF_NUM_THREADS) + AF_THREAD;"""
        run_text(body, (out, next_), 8, 64, seed)
        assert sorted(out) == [*range(8 * 64)]
        return tuple(out)

    assert len({order(seed) for seed in range(10)}) == 10
    assert order(3) == order(3)


TROUBLE = {
    "ended": "if (AF_THREAD < 5) return; AF_BARRIER();",
    "warp ended": "if (AF_THREAD >= 32) return; AF_BARRIER();",
    "in a shuffle": "if (AF_THREAD == 3) return; AF_SHUFFLE_XOR_I32(1, 1);",
    "mixed": "if (AF_THREAD < 5) AF_BARRIER(); else AF_SHUFFLE_XOR_I32(1, 1);",
    "two barriers": "if (AF_THREAD < 32)\n AF_BARRIER();\nelse\n AF_BARRIER();",
    "two reductions": """AF_EXCHANGE(exchange); const double one = 1;
        if (AF_THREAD % 32 < 7)
            af_team_sum_f64(one, 32, exchange);
        else
            af_team_sum_f64(one, 32, exchange);""",
    "warps in two reductions": """AF_EXCHANGE(exchange); const double one = 1;
        if (AF_THREAD < 32)
            af_team_sum_f64(one, 64, exchange);
        else
            af_team_sum_f64(one, 64, exchange);""",
    "much": "AF_SHARED(char, x, 50000); x[0] = 1;",
    "beside": "AF_SHARED(int32_t, x, 16); AF_SHARED(int32_t, y, 16);"
    " x[16 + AF_THREAD % 16] = y[0] = 1;",
    "before": "AF_SHARED(int32_t, x, 16); x[-1] = 1;",
}


@pytest.mark.parametrize("name", TROUBLE)
@pytest.mark.parametrize("seed", range(3))
def test_what_would_hang_or_mean_nothing_is_trouble(run_text, name, seed):
    body = TROUBLE[name]
    with raises(EmulationError):
        run_text(body, (), num_blocks=2, seed=seed)
    assert sums(run_text, SUM, seed)  # the next kernel finds everything in order


@pytest.mark.parametrize(
    "body",
    [
        "af_word b[2]; b[0] = b[1] = a[0]; *(int64_t *)a[0].p = b[2].i;",
        "int32_t x; *(int64_t *)a[0].p = x + 1;",
    ],
)
def test_what_is_read_behind_an_array_or_before_it_is_written_is_refused(run_text, body):
    """On a GPU each thread finds something of its own there, and no compiler warns."""
    with pytest.raises(CompilerError, match=r"array-bounds|uninitialized"):
        run_text(body, (0,))


def test_a_text_that_says_its_threads_do_not_meet_must_keep_that(run_text):
    with raises(EmulationError):
        run_text("AF_BARRIER();", (), has_exchanges=False)
    out = np.zeros(96, np.int32)
    body = "((int32_t *)a[0].p)[AF_BLOCK * AF_NUM_THREADS + AF_THREAD] = AF_THREAD;"
    run_text(body, (out,), 3, 32, has_exchanges=False)
    np.testing.assert_array_equal(out, np.tile(np.arange(32), 3))


def test_a_bad_index_is_reported_once_the_lowest_of_them(run_text):
    cell, count, any_ = np.zeros(7, np.int64), np.array([41]), np.zeros(1, np.int64)
    cell[4:6] = count.ctypes.data, any_.ctypes.data
    run_text("if (AF_THREAD > 9) af_report(a[0].p, AF_THREAD, -AF_THREAD);", (cell,))
    assert [*cell[:4], *any_] == [0, 42, 10, -10, 1]


@pytest.mark.parametrize("flag", [0, 1])
def test_a_bad_index_counts_where_all_flags_around_it_are_as_they_have_to_be(run_text, flag):
    cell, count, any_ = np.zeros(11, np.int64), np.array([41]), np.zeros(1, np.int64)
    flags = np.array([1, flag], np.uint8)
    cell[4:7] = count.ctypes.data, any_.ctypes.data, 2
    cell[7:] = flags.ctypes.data, 1, flags.ctypes.data + 1, 1
    run_text("if (AF_THREAD == 9) af_report(a[0].p, AF_THREAD, -AF_THREAD);", (cell,))
    assert [*cell[:4], *any_] == ([0, 42, 9, -9, 1] if flag else [0, 0, 0, 0, 0])


SHUFFLES = """for (int32_t mask = {0} / 2; mask; mask >>= 1) {{
    const {3} other = AF_SHUFFLE_XOR_{2}(x, mask);
    x = {1}(x, other);
}}"""


@pytest.mark.parametrize("join", ["AF_ADD", "AF_LARGER", "AF_SMALLER"])
@pytest.mark.parametrize(("type_", "kind"), [("float", "F32"), ("double", "F64")])
@pytest.mark.parametrize("width", [1, 2, 8, 32])
def test_a_reduction_of_a_warp_gives_the_bits_of_its_shuffles(run_text, join, type_, kind, width):
    rng = np.random.default_rng(width)
    numpy_type = {"float": np.float32, "double": np.float64}[type_]
    x = rng.standard_normal(96).astype(numpy_type)
    x[rng.integers(96, size=5)] = [0.0, -0.0, np.nan, np.inf, 1e-42]
    found = []
    for text in (
        SHUFFLES.format(width, join, kind, type_),
        f"AF_IN_WARP({type_}, {type_}, AF_SHUFFLE_XOR_{kind}, {join}, x, {width})",
    ):
        out = np.zeros_like(x)
        body = f"{type_} x = (({type_} *)a[0].p)[AF_THREAD]; {text}"
        body += f"(({type_} *)a[1].p)[AF_THREAD] = x;"
        run_text(body, (x, out), num_threads=96)
        found.append(out.tobytes())
    assert found[0] == found[1]
