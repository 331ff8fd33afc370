"""Calls of cuDNN as their records say, and as the driver checks it."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from actors.device.cuda.driver import CudaError
from actors.kernels.cuda.calls import (
    BACKWARD,
    CONV,
    CONV_INPUT_GRAD,
    CONV_WEIGHT_GRAD,
    FORWARD,
    ConvCall,
    CudnnTensor,
    SdpaCall,
)
from actors.kernels.cuda.kernel import gpu_named
from actors.testing.emulated import library_calls
from actors.testing.emulated.driver import EmulatedCuda, EmulatedDriver
from actors.testing.simulated import LateSchedule
from compiler.contract.types import DType, contiguous_strides

SHAPE, LSE = (1, 2, 8, 8), (1, 2, 8, 1)
SIZE = 1 * 2 * 8 * 8 * 2


NEEDS = 4 * 2 * 8 * (8 + 1)
"""Bytes of dq in float32, and of a sum for each query."""


def record(names, *, causal=True):
    tensors = [
        CudnnTensor(name, DType.FLOAT32, LSE, (16, 8, 1, 1))
        if name == "lse"
        else CudnnTensor(name, DType.FLOAT16, SHAPE, (128, 64, 8, 1))
        for name in names
    ]
    return SdpaCall(tuple(tensors), 0.5, causal)


@pytest.fixture
def driver(native_toolchain):
    cuda = EmulatedCuda(LateSchedule(Random(0)))
    return EmulatedDriver(cuda, native_toolchain, gpu_named("h200"))


@pytest.fixture
def places(driver):
    """Addresses of the tensors of a gradient, and of its workspace."""
    return [driver.allocate(SIZE) for _ in BACKWARD], driver.allocate(NEEDS)


def bytes_at(driver, address, size):
    out = np.zeros(size, np.uint8)
    driver.copy(out.ctypes.data, address, size)
    return out


def test_it_runs_on_its_stream_and_spoils_its_workspace(driver, places):
    (q, k, v, y, lse, *_), scratch = places
    rng = np.random.default_rng(3)
    given = [rng.standard_normal(SHAPE).astype(np.float16) for _ in range(3)]
    for place, array in zip((q, k, v), given, strict=True):
        driver.copy(place, array.ctypes.data, SIZE)
    driver.copy(scratch, np.zeros(64, np.uint8).ctypes.data, 64)
    choice = driver.make_cudnn(record(FORWARD), 64)
    driver.cudnn_later(choice, (q, k, v, y, lse), scratch, driver.make_stream("s"))
    driver.synchronize()
    exact = [array.astype(np.float64) for array in given]
    scores = 0.5 * exact[0] @ exact[1].swapaxes(-1, -2)
    scores[..., ~np.tri(8, dtype=bool)] = -np.inf
    p = np.exp(scores)
    sums = p.sum(-1, keepdims=True)
    made = bytes_at(driver, y, SIZE).view(np.float16).reshape(SHAPE)
    np.testing.assert_allclose(made, p / sums @ exact[2], atol=2e-3)
    stats = bytes_at(driver, lse, 64).view(np.float32).reshape(LSE)
    np.testing.assert_allclose(stats, np.log(sums), rtol=1e-5)
    assert set(bytes_at(driver, scratch, 64)) == {0xFF}


def fails(code, call):
    with pytest.raises(CudaError) as caught:
        call()
    assert caught.value.code == code
    return str(caught.value)


@pytest.mark.parametrize(
    ("names", "moved"), [(FORWARD, {3: 16}), (BACKWARD, {8: 1 << 20})], ids=str
)
def test_operands_lie_where_they_may(driver, names, moved):
    blocks = [driver.allocate(SIZE) for _ in names]
    addresses = tuple([place + moved.get(index, 0) for index, place in enumerate(blocks)])
    choice = driver.make_cudnn(record(names), NEEDS)
    driver.cudnn_later(choice, addresses, driver.allocate(NEEDS), driver.make_stream("s"))
    assert "are nobody's" in fails(700, driver.synchronize)


def test_an_operand_that_begins_between_loads_is_found(driver):
    blocks = [driver.allocate(2 * SIZE) for _ in FORWARD]
    choice = driver.make_cudnn(record(FORWARD), 0)
    addresses = (blocks[0] + 8, *blocks[1:])
    driver.cudnn_later(choice, addresses, 0, driver.make_stream("s"))
    assert "q of a library's call, which should lie at" in fails(716, driver.synchronize)


@pytest.mark.parametrize(("result", "operand"), [(6, 0), (6, 4), (7, 1), (8, 2)])
def test_a_result_over_an_operand_is_found(driver, places, result, operand):
    addresses, scratch = places
    addresses[result] = addresses[operand]
    choice = driver.make_cudnn(record(BACKWARD), NEEDS)
    driver.cudnn_later(choice, tuple(addresses), scratch, driver.make_stream("s"))
    assert "lies over an operand" in fails(1, driver.synchronize)


@pytest.mark.parametrize(
    ("keeps_scores", "least"), [(False, NEEDS), (True, 2 * (2 * 64 * 64 + 4 * 8))]
)
def test_a_gradient_has_no_plan_without_room_for_what_its_way_keeps(driver, keeps_scores, least):
    """That of a head of 8 rows and keys is a tile of scores, or dq in float32."""
    call = replace(record(BACKWARD), keeps_scores=keeps_scores)
    assert f"needs {least:,} bytes of workspace" in fails(
        3000, lambda: driver.make_cudnn(call, least - 1)
    )
    driver.make_cudnn(call, least)


@pytest.mark.cuda
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("names", [FORWARD, BACKWARD], ids=["attention", "gradient"])
def test_the_librarys_graph_gives_the_bits_of_our_record(names, causal):
    pytest.importorskip("cudnn", reason="needs the extra [cudnn]")
    sdpa = replace(record(names, causal=causal), keeps_scores=names == BACKWARD)
    said = library_calls.described_cudnn_call(sdpa)
    assert said == sdpa
    assert said is not sdpa
    found = []
    for call in (sdpa, said):
        rng = np.random.default_rng(4)
        arrays = [rng.standard_normal(SHAPE).astype(np.float16) for _ in names]
        arrays[names.index("lse")] = rng.standard_normal(LSE).astype(np.float32)
        library_calls.run_cudnn_call(call, tuple([array.ctypes.data for array in arrays]))
        found.append([array.tobytes() for array in arrays])
    assert found[0] == found[1]


@pytest.mark.cuda
def test_the_librarys_graph_of_a_convolution_is_our_record():
    pytest.importorskip("cudnn", reason="needs the extra [cudnn]")
    lies = ("x", (2, 4, 7, 6)), ("weight", (6, 2, 3, 3)), ("y", (2, 6, 4, 6))
    tensors = [CudnnTensor(n, DType.FLOAT16, s, contiguous_strides(s, 1)) for n, s in lies]
    for names in (CONV, CONV_INPUT_GRAD, CONV_WEIGHT_GRAD):
        held = {t.name: t for t in tensors} | {f"d{t.name}": t for t in tensors}
        own = tuple([replace(held[name], name=name) for name in names])
        call = ConvCall(own, (1, 1), (2, 1), (1, 1))
        said = library_calls.described_cudnn_call(call)
        assert said == call
        assert said is not call
