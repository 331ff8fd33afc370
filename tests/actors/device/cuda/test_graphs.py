"""Chains are captured once and replayed by one call; nothing is built or allocated then."""

import ctypes
import sys
from dataclasses import replace

import numpy as np
import pytest
from error_texts import raises

from actors.device.cuda.driver import CudaError
from actors.device.cuda.streams import WholeChain
from actors.kernels.cuda.calls import (
    AlternativeCalls,
    CopyBytes,
    FillBytes,
    LtEpilogue,
    LtLayout,
    LtProduct,
    RunCudnn,
    RunProduct,
    SdpaCall,
)
from actors.machine.protocol import DeviceFault
from compiler.contract.errors import DeviceError, InternalError, OutOfMemory
from compiler.contract.types import DType
from tests.shared.recording_driver import kernel_call


def test_a_chain_of_three_calls_is_a_graph_and_a_firing_is_one_call(copies, driver):
    stream = copies.device.make_stream("compute")
    driver.calls.clear()
    (chain,) = copies.device.bind_chain(stream, copies.launches[:3])
    assert driver.names() == ["load", "begin_capture", *["copy_later"] * 3, "end_capture"]
    driver.calls.clear()
    for _ in range(5):
        chain()
    assert driver.names() == ["graph_later"] * 5
    assert stream.num_launches == 15


def test_what_is_captured_does_not_happen_before_the_graph_runs(copies, driver):
    stream = copies.device.make_stream("compute")
    held = (ctypes.c_uint64 * 8).from_address(copies.block.address)
    held[0], held[1] = 1, 77
    (chain,) = copies.device.bind_chain(stream, copies.launches)
    assert held[0] == 1
    chain()
    assert held[0] == 77


def test_a_short_chain_is_put_on_the_stream_call_by_call(copies, driver):
    stream = copies.device.make_stream("h2d")
    (chain,) = copies.device.bind_chain(stream, copies.launches[:2])
    driver.calls.clear()
    chain()
    assert driver.calls == [("copy_later", "h2d")] * 2
    (empty,) = copies.device.bind_chain(stream, ())
    driver.calls.clear()
    empty()
    assert driver.calls == []


def test_firings_build_nothing(copies):
    stream = copies.device.make_stream("compute")
    chains = [copies.device.bind_chain(stream, copies.launches[:n])[0] for n in (2, 4)]

    class Quiet:
        def __call__(self):
            pass

    def built(chain):
        before = sys.getallocatedblocks()
        for _ in range(200):
            chain()
        return sys.getallocatedblocks() - before

    for chain in chains:
        chain._puts = tuple([Quiet() for _ in chain._puts])
        # The best of some: other threads of the tests allocate what they like meanwhile.
        assert min([built(chain) for _ in range(8)]) <= 2  # a count that is no small integer


def test_argument_blocks_hold_integers_and_doubles_and_are_kept(make_device, driver):
    seen = []
    device = make_device(
        {"k": (kernel_call(lambda words: seen.append(words), (7, -1, 2**63 + 5, 0.5)),)}
    )
    stream = device.make_stream("compute")
    (chain,) = device.bind_chain(stream, (device.bind("k", {}, (), (), None, ()),))
    chain()
    half = int(np.float64(0.5).view(np.int64))
    assert seen == [[7, -1, 2**63 + 5 - 2**64, half]]


def test_all_texts_of_a_plan_are_loaded_at_once(make_device, driver):
    calls = [(kernel_call(len),) for _ in range(3)]
    device = make_device({str(n): call for n, call in enumerate(calls)})
    launches = [device.bind(str(n % 3), {}, (), (), None, ()) for n in range(6)]
    stream = device.make_stream("compute")
    driver.calls.clear()
    for launch in launches:
        device.bind_chain(stream, (launch,))
    assert [call[1] for call in driver.calls if call[0] == "load"] == [3, 0, 0, 0, 0, 0]


def product():
    square = LtLayout(DType.FLOAT32, 4, 4, 4)
    return LtProduct(square, square, square, transpose_a=False, transpose_b=False)


def test_a_product_is_chosen_once_for_all_of_its_kind(make_device, driver):
    call = RunProduct(product(), 256, 512, 768, 768, 1024, 64)
    device = make_device({"p": (call,)})
    launches = tuple([device.bind("p", {}, (), (), None, ()) for _ in range(3)])
    assert driver.counts()["make_product"] == 1
    (chain,) = device.bind_chain(device.make_stream("compute"), launches)
    assert driver.counts()["product_later"] == 3
    chain()
    assert driver.names()[-1] == "graph_later"


def test_attention_is_chosen_once_for_all_of_its_kind(make_device, driver):
    sdpa = SdpaCall((), 0.5, causal=True)
    device = make_device({"a": (RunCudnn(sdpa, (256, 512), 1024, 64),)})
    launches = tuple([device.bind("a", {}, (), (), None, ()) for _ in range(3)])
    assert driver.counts()["make_cudnn"] == 1
    (chain,) = device.bind_chain(device.make_stream("compute"), launches)
    assert driver.counts()["cudnn_later"] == 3
    chain()
    assert driver.names()[-1] == "graph_later"


def test_a_deterministic_device_has_products_chosen_by_a_fixed_rule(
    make_device, driver, monkeypatch
):
    asked = []

    def make_product(product, workspace_bytes):
        asked.append(product.is_deterministic)
        return 1

    monkeypatch.setattr(driver, "make_product", make_product)
    for is_deterministic in (False, True):
        calls = {"p": (RunProduct(product(), 256, 512, 768, 768, 1024, 64),)}
        make_device(calls, is_deterministic=is_deterministic).bind("p", {}, (), (), None, ())
    assert asked == [False, True]


PLAIN = RunProduct(product(), 256, 512, 768, 768, 1024, 64)
JOINED = replace(PLAIN, product=replace(product(), epilogue=LtEpilogue.BIAS, bias=64))


def refusing(monkeypatch, driver, *epilogues):
    right = driver.make_product

    def make_product(asked, workspace_bytes):
        if asked.epilogue in epilogues:
            raise CudaError("none", code=15, call="cublasLtMatmulAlgoGetHeuristic")
        return right(asked, workspace_bytes)

    monkeypatch.setattr(driver, "make_product", make_product)


def names_of_a_firing(device, driver, kernel="p"):
    """Bind a chain of one launch, and return what a firing asks the driver for."""
    launch = device.bind(kernel, {}, (), (), None, ())
    (chain,) = device.bind_chain(device.make_stream("compute"), (launch,))
    bound = driver.names()
    driver.calls.clear()
    chain()
    return driver.names(), bound


def test_a_way_that_the_library_refuses_is_left_out(make_device, driver, monkeypatch):
    refusing(monkeypatch, driver, LtEpilogue.BIAS)
    device = make_device(
        {"p": (AlternativeCalls(((JOINED,), (PLAIN, kernel_call(len)))),), "q": (JOINED,)}
    )
    names, bound = names_of_a_firing(device, driver)
    assert names == ["product_later", "launch_later"]
    assert "choose_way" not in bound
    with raises(DeviceError):
        device.bind("q", {}, (), (), None, ())


def test_where_the_library_refuses_every_way_its_error_comes_out(make_device, driver, monkeypatch):
    refusing(monkeypatch, driver, LtEpilogue.BIAS, LtEpilogue.NONE)
    device = make_device({"p": (AlternativeCalls(((JOINED,), (PLAIN,))),)})
    with raises(DeviceError):
        device.bind("p", {}, (), (), None, ())


@pytest.mark.parametrize("way", [0, 1])
def test_the_way_that_the_driver_finds_the_fastest_is_taken(make_device, driver, way):
    driver.way = way
    device = make_device({"p": (AlternativeCalls(((JOINED,), (PLAIN, kernel_call(len)))),)})
    names, bound = names_of_a_firing(device, driver)
    assert names == [["product_later"], ["product_later", "launch_later"]][way]
    assert bound.index("load") < bound.index("choose_way")
    # All ways ran on scratch, after it was filled.
    assert bound[bound.index("choose_way") + 1 :].count("product_later") == 2


def test_a_choice_holds_for_all_launches_that_are_alike(make_device, driver):
    device = make_device({"p": (AlternativeCalls(((JOINED,), (PLAIN, kernel_call(len)))),)})
    launches = tuple([device.bind("p", {}, (), (), None, ()) for _ in range(2)])
    driver.way = 1
    device.bind_chain(device.make_stream("compute"), launches[:1])
    driver.way = 0
    (chain,) = device.bind_chain(device.make_stream("compute"), launches[1:])
    assert driver.counts()["choose_way"] == 1
    driver.calls.clear()
    chain()
    assert driver.names() == ["product_later", "launch_later"]


def test_a_deterministic_device_takes_the_first_way_unmeasured(make_device, driver):
    driver.way = 1
    kernels = {"p": (AlternativeCalls(((JOINED,), (PLAIN, kernel_call(len)))),)}
    names, bound = names_of_a_firing(make_device(kernels, is_deterministic=True), driver)
    assert names == ["product_later"]
    assert "choose_way" not in bound


def test_a_product_that_no_algorithm_takes_names_its_kernel(make_device, driver):
    driver.failing["make_product"] = 15
    device = make_device({"p": (RunProduct(product(), 256, 512, 768, 768, 1024, 64),)})
    with raises(DeviceError):
        device.bind("p", {}, (), (), None, ())


def test_a_kernel_that_breaks_while_it_is_bound_is_named(make_device):
    class Broken:
        def plan(self, *args):
            raise KeyError("axis")

    with raises(DeviceError):
        make_device({"odd": Broken()}).bind("odd", {}, (), (), None, ())
    with raises(DeviceError):
        make_device({"odd": Broken()}).bind("odd", {}, (), (), None, ())


def test_a_launch_that_allocates_in_a_capture_is_a_bug_and_the_stream_is_free_again(
    copies, driver, monkeypatch
):
    stream = copies.device.make_stream("compute")
    with monkeypatch.context() as patch:
        patch.setattr(driver, "copy_later", lambda *args: driver.allocate(8))
        with raises(InternalError):
            copies.device.bind_chain(stream, copies.launches)
    assert driver.captured is None
    assert isinstance(copies.device.bind_chain(stream, copies.launches)[0], WholeChain)


@pytest.mark.parametrize(("code", "family"), [(901, InternalError), (2, OutOfMemory)])
def test_what_a_capture_says_belongs_to_a_family(copies, driver, code, family):
    driver.failing["end_capture"] = code
    with pytest.raises(family):
        copies.device.bind_chain(copies.device.make_stream("compute"), copies.launches)


def test_a_device_that_cannot_be_opened_says_so_in_our_words(make_device, driver):
    driver.failing["allocate_pinned"] = 1
    with raises(DeviceError):
        make_device(index=3)


@pytest.mark.parametrize("name", ["make_stream", "make_event"])
def test_what_is_made_and_refused_is_told_in_our_words(make_device, driver, name):
    driver.failing[name] = 2
    device = make_device()
    make = {"make_stream": lambda: device.make_stream("h2d"), "make_event": device.make_event}
    with raises(OutOfMemory):
        make[name]()


# -- stepwise ------------------------------------------------------------------------------------


def stepwise(make_device, *functions):
    device = make_device(
        {str(n): (kernel_call(f), FillBytes(256, 0, 0)) for n, f in enumerate(functions)},
        is_stepwise=True,
    )
    stream = device.make_stream("compute")
    launches = tuple([device.bind(str(n), {}, (), (), None, ()) for n in range(len(functions))])
    return device, stream, device.bind_chain(stream, launches)[0]


def test_a_stepwise_device_waits_for_every_launch(make_device, driver):
    _, stream, chain = stepwise(make_device, len, len, len)
    driver.calls.clear()
    chain()
    assert driver.names() == ["launch_later", "fill_later", "synchronize"] * 3
    assert stream.num_launches == 3


def test_a_stepwise_device_names_the_launch_that_fails(make_device, driver):
    def fail(words):
        driver.failing["synchronize"] = 700

    _, stream, chain = stepwise(make_device, len, fail, len)
    with raises(DeviceFault) as caught:
        chain()
    assert (caught.value.stream, caught.value.launch, chain.running) == (stream, 1, 1)


def test_watched_launches_are_waited_for_one_by_one(copies, driver):
    seen = []

    def watched(launch):
        def call():
            seen.append("before")
            launch()
            seen.append(driver.names()[-1])

        return call

    stream = copies.device.make_stream("compute")
    chain = tuple([watched(launch) for launch in copies.launches])
    (bound,) = copies.device.bind_chain(stream, chain)
    driver.calls.clear()
    bound()
    assert driver.calls == [("copy_later", "compute"), ("synchronize",)] * 4
    assert seen == ["before", "synchronize"] * 4
    assert (bound.running, stream.num_launches) == (3, 4)


def test_a_launch_outside_of_a_chain_is_a_bug(copies):
    with raises(InternalError):
        copies.launches[0]()


def test_copies_are_copies_of_the_right_bytes(make_device, driver):
    held = np.arange(64, dtype=np.uint8)
    address = held.ctypes.data
    calls = CopyBytes(address, address + 32, 16), FillBytes(address + 16, 9, 4)
    device = make_device({"k": calls})
    (chain,) = device.bind_chain(device.make_stream("s"), (device.bind("k", {}, (), (), None, ()),))
    chain()
    assert held[:16].tolist() == list(range(32, 48))
    assert held[16:22].tolist() == [9, 9, 9, 9, 20, 21]
