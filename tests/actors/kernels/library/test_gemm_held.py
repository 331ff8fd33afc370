"""Products of a loop by an operand that is packed once before it."""

import numpy as np
import pytest

import actorflow as af
from actorflow import nn
from actors.kernels.common.gemm import gemm_of, view_of_array
from actors.kernels.host import control
from actors.kernels.library import onednn
from actors.kernels.library.gemm_onednn import PACKED_ROWS, PrepackedGemm

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(autouse=True)
def _with_library():
    if not onednn.is_available():
        pytest.skip("the library is not installed")


def aligned_bytes(size):
    raw = np.full(size + 128, 7, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size], raw[start + size : start + size + 64]


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("extents", [(1, 64, 64), (20, 300, 520), (33, 65, 2048), (300, 40, 130)])
def test_a_product_by_what_was_packed_is_that_of_numpy_for_every_a(extents, is_turned):
    m, k, n = extents
    rng = np.random.default_rng(0)
    a, out = np.empty((m, k), np.float32), np.full((m, n), np.nan, np.float32)
    b = rng.standard_normal((n, k) if is_turned else (k, n), np.float32)
    b = b.T if is_turned else b
    gemm = gemm_of(*[view_of_array(x) for x in (a, b, out)])
    product = PrepackedGemm.of(gemm)
    kept, beyond = aligned_bytes(product.size_bytes)
    pack, step = product.launches((a, b, out), kept)
    expected = b.astype(float)
    pack()
    b[...] = np.nan  # it is not read again
    for _ in range(2):
        a[...] = rng.standard_normal((m, k), np.float32)
        step()
        np.testing.assert_allclose(out, a.astype(float) @ expected, rtol=1e-4, atol=1e-4)
    assert (beyond == 7).all()


def test_products_of_many_rows_or_of_a_batch_are_left_as_they_are():
    for batch, rows in (((), PACKED_ROWS), ((2,), 8)):
        shapes = (*batch, rows, 64), (*batch, 64, 64), (*batch, rows, 64)
        views = [view_of_array(np.empty(shape, np.float32)) for shape in shapes]
        assert PrepackedGemm.of(gemm_of(*views)) is None
    assert PrepackedGemm.of(None) is None


def trained():
    """Return the losses of an LSTM in two steps, and how many packs its loops bound."""
    found = []

    # By rule: the library that is the fastest here today may be one that packs nothing.
    @af.job(optimizer=af.optim.SGD(0.1), seed=1, deterministic=True)
    def train(model, batch):
        return (model(batch.x)[0] ** 2.0).mean()

    class Watched(control.BoundStep):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            found.append(len(self.before))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "BoundStep", Watched)
        model = nn.LSTM(40, 72)
        x = np.random.default_rng(0).standard_normal((5, 20, 40)).astype(np.float32)
        losses = [float(train.step(model, {"x": x})["loss"]) for _ in range(2)]
        train.close(model)
    return losses, found


def test_a_loop_packs_what_stays_the_same_and_computes_the_same(monkeypatch):
    losses, packs = trained()
    assert packs == [1, 1]
    monkeypatch.setattr(control, "held_products", lambda body: {})
    others, packs = trained()
    assert packs == [0, 0]
    np.testing.assert_allclose(others, losses, rtol=1e-5)
