import numpy as np


def product(a, b):
    return np.einsum("...mk,...kn->...mn", a.astype(np.float64), b.astype(np.float64))


def check(harness, a, b, out=None):
    expected = product(a, b)
    if out is None:
        out = harness.spoiled(expected.shape, a.dtype)
    harness.run("matmul", {}, (a, b), (out,))
    tolerance = 1e-12 if a.dtype == np.float64 else 2e-5
    np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)


def test_attention_layouts_are_right_and_small_transposed_keys_are_packed(harness):
    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((2, 3, 16, 2, 8), dtype=np.float32)
    q, kt = q.transpose(0, 2, 1, 3), k.transpose(0, 2, 3, 1)
    check(harness, q, kt)
    _, needs, _ = harness.bind("matmul", {}, (q, kt), (np.zeros((3, 2, 16, 16), np.float32),))
    assert needs.workspace_bytes == kt.size * 4
    scores = rng.standard_normal((3, 2, 16, 16), dtype=np.float32)
    check(harness, scores, q, np.zeros((3, 16, 2, 8), np.float32).transpose(0, 2, 1, 3))
    check(harness, scores.swapaxes(2, 3), q)


def test_matrices_that_blas_can_read_need_no_scratch(harness):
    a, b = np.zeros((4, 6, 8), np.float32), np.zeros((8, 10), np.float32)
    out = np.zeros((4, 6, 10), np.float32)
    for left, right in ((a, b), (a, np.zeros((10, 8), np.float32).T)):
        _, needs, _ = harness.bind("matmul", {}, (left, right), (out,))
        assert needs.workspace_bytes == 0
    _, needs, _ = harness.bind("matmul", {}, (a[..., ::2], b[::2]), (out,))
    assert needs.workspace_bytes == 4 * 6 * 4 * 4


def test_a_batch_against_one_matrix_is_one_large_product(harness):
    a, b = np.zeros((4, 6, 8), np.float32), np.zeros((8, 10), np.float32)
    launch, _, _ = harness.bind("matmul", {}, (a, b), (np.zeros((4, 6, 10), np.float32),))
    assert [x.shape for x in launch.args] == [(24, 8), (8, 10)]
