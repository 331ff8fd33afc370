"""What kernels of ids compile to; needs NVRTC."""

import numpy as np
import pytest

from actors.kernels.cuda import nvrtc
from actors.kernels.cuda.catalogue import kernels_on
from actors.kernels.cuda.embedding import (
    TILE,
)
from actors.kernels.cuda.kernel import gpu_named
from compiler.contract.types import DType, TensorType

GPU = gpu_named("h200")


@pytest.fixture(scope="module")
def compiler():
    if not nvrtc.is_here():
        pytest.skip("NVRTC is not installed")


@pytest.mark.cuda
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_kernels_of_ids_keep_all_in_registers(arch, compiler, emulated_run, harness):
    ids, dy = np.zeros(TILE + 1, np.int32), np.zeros((TILE + 1, 3), np.float32)
    table, lr = np.zeros((9, 3), np.float32), np.array(0.1, np.float32)
    attrs = harness.fused("embedding_sgd_update", {"weight_decay": 0.0}, (table, dy, ids, lr))[1]
    float32 = DType.FLOAT32
    found = [
        emulated_run(
            kernels_on(GPU)["cuda.embedding"], {}, (table, ids), (TensorType(float32, dy.shape),)
        ),
        emulated_run(
            kernels_on(GPU)["cuda.embedding_grad"],
            {"rows": 9},
            (dy, ids),
            (TensorType(float32, table.shape),),
        ),
        emulated_run(
            kernels_on(GPU)["cuda.embedding_update"],
            attrs,
            (table, dy, ids, lr),
            (TensorType(float32, table.shape),),
            in_place=((0, 0),),
        ),
    ]
    texts = {c.text.text: c.text for f in found for c in f.calls if hasattr(c, "text")}
    assert len(texts) == 4
    for text in texts.values():
        for name, used in nvrtc.usage(text, arch).items():
            assert used.spilled_bytes == 0, name
            # Of 256 threads: three blocks at once, but for one that is alone.
            assert used.registers <= (128 if name.endswith("_tile") else 80), name
