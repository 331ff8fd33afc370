"""What cupy is asked for, by modules that note it; and what is said where something is missing."""

import ctypes
import importlib.util
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from error_texts import raises

from actors.device.cuda import cupy_driver
from actors.device.cuda.cublaslt import CublasLt
from actors.device.cuda.cupy_driver import CupyDriver
from actors.device.cuda.driver import CudaError
from actors.kernels.cuda.calls import (
    FORWARD,
    CudnnTensor,
    KernelText,
    LtLayout,
    LtProduct,
    SdpaCall,
)
from compiler.contract.errors import DeviceError
from compiler.contract.types import DType


class Refused(Exception):
    """As cupy's errors are: with the code as `status`."""

    def __init__(self, status):
        super().__init__(f"cudaError {status}")
        self.status = status


class Noted:
    """A module whose every function notes its call and returns what `answers` says, or a number."""

    def __init__(self, calls, **answers):
        self.calls, self.answers, self.failing = calls, answers, {}
        self.CUDADriverError = self.CUDARuntimeError = Refused

    def __getattr__(self, name):
        def call(*given):
            self.calls.append((name, *given))
            if name in self.failing:
                raise Refused(self.failing[name])
            answer = self.answers.get(name, len(self.calls))
            return answer(*given) if callable(answer) else answer

        return call


PROPERTIES = {
    "name": b"NVIDIA H200", "major": 9, "minor": 0, "multiProcessorCount": 132,
    "totalGlobalMem": 1 << 37,
}  # fmt: skip


@pytest.fixture
def modules():
    """cupy's modules of the driver and the runtime, and all calls in one list."""
    calls = []
    runtime = Noted(
        calls,
        driverGetVersion=13_000,
        getDeviceCount=2,
        getDeviceProperties=PROPERTIES,
        memGetInfo=(7, 9),
    )
    return SimpleNamespace(calls=calls, cuda=Noted(calls), runtime=runtime)


@pytest.fixture
def opened(modules):
    """Return a function that opens a GPU on these modules; it takes other libraries by name.

    Its cuBLASLt are the `products`, one at most, and its cuDNN is `attention`.
    """
    products, attention, current = [], Attention(), threading.local()

    def make_products(path):
        products.append(Library(path))
        return products[-1]

    def open_(index, folder=None, **others):
        usual = {
            "modules": lambda: (modules.cuda, modules.runtime), "current": current,
            "build": lambda texts, *rest: tuple([b"x" for _ in texts]),
            "find": lambda name: name, "products": make_products,
            "cudnn": lambda *names: attention,
        }  # fmt: skip
        return CupyDriver(index, folder, cupy_driver.CudaLibraries(**{**usual, **others}))

    open_.products, open_.attention = products, attention
    return open_


@pytest.fixture
def driver(opened, modules):
    made = opened(1)
    modules.calls.clear()
    return made


def asked(modules, call):
    """Return what a call asks for, but for saying which GPU it is for."""
    modules.calls.clear()
    result = call()
    return result, [c for c in modules.calls if c[0] != "setDevice"]


# -- opening -------------------------------------------------------------------------------------


def test_a_gpu_says_what_it_is(opened):
    seen = opened(0).seen()
    assert (seen.name, seen.capability, seen.num_sms) == ("NVIDIA H200", (9, 0), 132)
    assert (seen.memory_bytes, seen.driver_version) == (1 << 37, 13_000)


@pytest.mark.parametrize(
    "answers", [{"driverGetVersion": 0}, {"driverGetVersion": 12_080}, {"getDeviceCount": 1}]
)
def test_what_is_missing_is_said(opened, modules, answers):
    modules.runtime.answers |= answers
    with raises(DeviceError):
        opened(1)


def test_a_process_that_was_forked_from_one_with_cuda_is_told_so(opened, modules):
    modules.runtime.failing["getDeviceCount"] = 3
    with raises(DeviceError):
        opened(0)
    modules.runtime.failing["getDeviceCount"] = 100
    with raises(DeviceError):
        opened(0)


@pytest.mark.skipif(importlib.util.find_spec("cupy_backends") is not None, reason="cupy is here")
def test_a_missing_package_is_named_with_how_to_install_it():
    with raises(DeviceError):
        CupyDriver(0)


@pytest.mark.cuda
def test_without_a_driver_cupy_says_so():
    """Opens a driver for real; on a machine with a GPU there is nothing to refuse."""
    runtime = pytest.importorskip("cupy_backends.cuda.api.runtime", reason="cupy is not installed")
    if runtime.driverGetVersion():
        pytest.skip("there is a driver here")
    with pytest.raises(DeviceError, match="cuda:0 needs an NVIDIA driver, and none is here"):
        CupyDriver(0)


@pytest.mark.cuda
def test_cupy_has_every_function_that_is_asked_for():
    runtime = pytest.importorskip("cupy_backends.cuda.api.runtime", reason="cupy is not installed")
    cuda = pytest.importorskip("cupy_backends.cuda.api.driver", reason="cupy is not installed")
    assert runtime.memcpyDefault == cupy_driver.ANY_KIND
    assert runtime.streamNonBlocking == cupy_driver.NON_BLOCKING
    assert runtime.streamCaptureModeThreadLocal == cupy_driver.THREAD_LOCAL
    assert runtime.eventBlockingSync | runtime.eventDisableTiming == (
        cupy_driver.BLOCKING_WITHOUT_TIMES
    )
    assert cuda.CU_FUNC_ATTRIBUTE_NUM_REGS == cupy_driver.NUM_REGISTERS
    assert runtime.hostAllocPortable | runtime.hostAllocMapped == cupy_driver.PORTABLE_AND_MAPPED
    assert cuda.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES == cupy_driver.MAX_SHARED_ATTRIBUTE
    for module, names in ((runtime, _RUNTIME), (cuda, _CUDA)):
        assert [name for name in names.split() if not hasattr(module, name)] == []


_RUNTIME = """
driverGetVersion getDeviceCount getDeviceProperties setDevice memGetInfo malloc free hostAlloc
freeHost memcpy memcpyAsync memset memsetAsync streamCreateWithFlags streamSynchronize
streamDestroy eventCreate eventCreateWithFlags eventRecord streamWaitEvent eventQuery
eventSynchronize eventElapsedTime eventDestroy streamBeginCapture streamEndCapture graphInstantiate
graphDestroy graphUpload graphLaunch graphExecDestroy CUDARuntimeError
"""
_CUDA = """
moduleLoadData moduleGetFunction moduleUnload launchKernel funcSetAttribute funcGetAttribute
CUDADriverError
"""


_TAKEN = [
    ("malloc", 64), ("free", 0), ("hostAlloc", 64, 3), ("freeHost", 0), ("memcpy", 1, 2, 3, 4),
    ("memcpyAsync", 1, 2, 3, 4, 5), ("memset", 1, 2, 3), ("memsetAsync", 1, 2, 3, 4),
    ("memGetInfo",), ("setDevice", 0), ("getDeviceProperties", 0), ("streamCreateWithFlags", 1),
    ("streamSynchronize", 0), ("streamDestroy", 1), ("streamWaitEvent", 1, 2), ("eventCreate",),
    ("eventCreateWithFlags", 3), ("eventRecord", 1, 2), ("eventSynchronize", 1),
    ("eventElapsedTime", 1, 2), ("eventDestroy", 1), ("streamBeginCapture", 5, 1),
    ("streamEndCapture", 5), ("graphInstantiate", 5), ("graphDestroy", 5), ("graphUpload", 5, 6),
    ("graphLaunch", 5, 6), ("graphExecDestroy", 5),
]  # fmt: skip


@pytest.mark.cuda
def test_cupy_takes_every_call_as_it_is_made():
    """Without a driver its calls fail with CUDA's code, and not because of what they are given."""
    runtime = pytest.importorskip("cupy_backends.cuda.api.runtime", reason="cupy is not installed")
    if runtime.driverGetVersion():
        pytest.skip("there is a driver here")
    for name, *given in _TAKEN:
        with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorInsufficientDriver"):
            getattr(runtime, name)(*given)
    assert runtime.eventQuery(1) == 35  # which alone returns its code


# -- calls ---------------------------------------------------------------------------------------


def test_every_call_is_one_of_cupys(driver, modules):
    stream, event = driver.make_stream("compute"), driver.make_event()
    table = [
        (lambda: driver.allocate(64), [("malloc", 64)]),
        (lambda: driver.free(5), [("free", 5)]),
        (lambda: driver.allocate_pinned(64), [("hostAlloc", 64, 3)]),
        (lambda: driver.free_pinned(5), [("freeHost", 5)]),
        (lambda: driver.copy(1, 2, 3), [("memcpy", 1, 2, 3, 4), ("streamSynchronize", 0)]),
        (lambda: driver.copy_later(1, 2, 3, stream), [("memcpyAsync", 1, 2, 3, 4, stream)]),
        (lambda: driver.fill_later(1, 2, 3, stream), [("memsetAsync", 1, 2, 3, stream)]),
        (lambda: driver.make_stream("h2d"), [("streamCreateWithFlags", 1)]),
        (lambda: driver.make_event(), [("eventCreateWithFlags", 3)]),
        (lambda: driver.record(event, stream), [("eventRecord", event, stream)]),
        (lambda: driver.wait(stream, event), [("streamWaitEvent", stream, event)]),
        (lambda: driver.synchronize_event(event), [("eventSynchronize", event)]),
        (lambda: driver.begin_capture(stream), [("streamBeginCapture", stream, 1)]),
        (lambda: driver.graph_later(9, stream), [("graphLaunch", 9, stream)]),
    ]
    for call, expected in table:
        assert asked(modules, call)[1] == expected
    assert asked(modules, driver.free_bytes) == (7, [("memGetInfo",)])


@pytest.mark.parametrize(("code", "is_done"), [(0, True), (600, False)])
def test_an_event_is_done_or_not(driver, modules, code, is_done):
    modules.runtime.answers["eventQuery"] = code
    assert driver.is_done(4) is is_done


def test_an_event_behind_a_fault_is_neither(driver, modules):
    modules.runtime.answers["eventQuery"] = 700
    with pytest.raises(CudaError) as caught:
        driver.is_done(4)
    assert (caught.value.code, caught.value.call) == (700, "eventQuery")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("malloc", lambda d: d.allocate(8)),
        ("eventRecord", lambda d: d.record(1, 2)),
        ("streamWaitEvent", lambda d: d.wait(1, 2)),
        ("graphLaunch", lambda d: d.graph_later(1, 2)),
        ("eventSynchronize", lambda d: d.synchronize_event(1)),
        ("memcpyAsync", lambda d: d.copy_later(1, 2, 3, 4)),
    ],
)
def test_codes_are_told_with_the_call(driver, modules, name, call):
    modules.runtime.failing[name] = 719
    with pytest.raises(CudaError) as caught:
        call(driver)
    assert (caught.value.code, caught.value.call) == (719, name)


def test_a_thread_says_once_which_gpu_it_is_for_and_two_drivers_do_in_turn(driver, opened, modules):
    def devices(*calls):
        modules.calls.clear()
        for call in calls:
            call()
        return [given for name, *given in modules.calls if name == "setDevice"]

    other = opened(0)
    assert devices(lambda: driver.record(1, 2), lambda: driver.wait(1, 2)) == [[1]]
    assert devices(lambda: other.record(1, 2), lambda: driver.record(1, 2)) == [[0], [1]]
    driver.make_product(PRODUCT, 1024)
    driver.make_cudnn(SDPA, 1024)
    calls = [
        lambda: driver.synchronize_event(1),
        lambda: driver.launch_later(1, 1, 32, 0, 8, 1, 2),
        lambda: driver.product_later(0, 1, 2, 3, 4, 5, 6),
        lambda: driver.cudnn_later(0, (1, 2), 3, 4),
    ]
    for call in calls:
        found = []
        thread = threading.Thread(target=lambda f=found, c=call: f.extend(devices(c)))
        thread.start()
        thread.join()
        assert found == [[1]]


def test_a_graph_is_made_once_and_what_it_was_made_of_goes(driver, modules):
    modules.runtime.answers |= {"streamEndCapture": 11, "graphInstantiate": 12}
    graph, calls = asked(modules, lambda: driver.end_capture(5))
    assert graph == 12
    assert calls == [
        ("streamEndCapture", 5), ("graphInstantiate", 11), ("graphDestroy", 11),
        ("graphUpload", 12, 5),
    ]  # fmt: skip
    modules.runtime.failing["graphInstantiate"] = 2
    with pytest.raises(CudaError):
        driver.end_capture(5)
    assert modules.calls[-1] == ("graphDestroy", 11)


def test_a_kernel_gets_its_block_as_one_parameter(driver, modules):
    seen = []

    def launch(function, *given):
        *grid, shared, stream, parameters, extra = given
        place = ctypes.c_void_p.from_address(parameters).value
        seen.append((grid, shared, stream, extra, place))

    modules.cuda.answers["launchKernel"] = launch
    block = np.array([1, 2, 3], np.int64)
    for _ in range(2):
        driver.launch_later(77, 10, 256, 0, block.ctypes.data, 3, 5)
    assert seen == [([10, 1, 1, 256, 1, 1], 0, 5, 0, block.ctypes.data)] * 2
    assert "funcSetAttribute" not in [name for name, *_ in modules.calls]
    for _ in range(2):
        driver.launch_later(77, 10, 256, 60_000, block.ctypes.data, 3, 5)
    assert [c for c in modules.calls if c[0] == "funcSetAttribute"] == [
        ("funcSetAttribute", 77, 8, 60_000)
    ]


def test_texts_are_built_for_this_gpu_and_loaded_once(opened, modules):
    built = []

    def build(texts, arch, folder, num_threads):
        built.append((texts, arch, folder))
        return tuple([text.text.encode() for text in texts])

    driver = opened(1, build=build)
    one, two = KernelText("one", ("f",)), KernelText("two", ("g", "h"))
    driver.load((one, two))
    driver.load((one, two))
    assert built == [([one, two], "sm_90a", None)]
    assert [c for c in modules.calls if c[0] == "moduleLoadData"] == [
        ("moduleLoadData", b"one"), ("moduleLoadData", b"two"),
    ]  # fmt: skip
    assert driver.function(two, "g") == driver.function(two, "g") != driver.function(two, "h")


def test_closing_gives_everything_back(driver, modules):
    streams = [driver.make_stream(name) for name in ("compute", "h2d")]
    event = driver.make_event()
    modules.runtime.answers["graphInstantiate"] = 12
    driver.end_capture(streams[0])
    driver.load((KernelText("one", ("f",)),))
    _, calls = asked(modules, driver.close)
    names = [name for name, *_ in calls]
    assert names[:2] == ["streamSynchronize"] * 2
    gone = [c for c in calls if c[0].endswith("Destroy")]
    assert sorted(gone[2:]) == sorted([("streamDestroy", s) for s in streams])
    assert gone[:2] == [("graphExecDestroy", 12), ("eventDestroy", event)]
    assert names[-1] == "moduleUnload"


# -- products ------------------------------------------------------------------------------------


class Library:
    """In the place of cuBLASLt: notes what it is asked."""

    version = 130_000

    def __init__(self, path):
        self.opened = self.closed = self.warmed_code = 0
        self.ran, self.warmed = [], []

    def open(self):
        self.opened += 1

    def close(self):
        self.closed += 1

    def choose(self, product, workspace_bytes, trial, choices):
        addresses = trial.scratch((256, 0, 512))
        took = trial.duration_ns(lambda stream: self.ran.append(stream))
        return SimpleNamespace(took=took, addresses=addresses, algorithm=b"first")

    def warm(self, product, choice, trial):
        self.warmed.append(product)
        if self.warmed_code:
            raise CudaError("no", code=self.warmed_code, call="malloc")

    def run(self, *given):
        self.ran.append(given)


SQUARE = LtLayout(DType.FLOAT32, 4, 4, 4)
PRODUCT = LtProduct(SQUARE, SQUARE, SQUARE, transpose_a=False, transpose_b=False)


def test_a_product_is_tried_on_scratch_that_goes_and_run_with_its_choice(driver, opened, modules):
    modules.runtime.answers["eventElapsedTime"] = 0.25
    choice, calls = asked(modules, lambda: driver.make_product(PRODUCT, 1024))
    names = [name for name, *_ in calls]
    made = [c for c in calls if c[0] == "malloc"]
    assert made == [("malloc", 256), ("malloc", 1), ("malloc", 512)]
    assert names.count("memset") == 3
    filled = len(names) - 1 - names[::-1].index("memset")
    assert calls[filled + 1] == ("streamSynchronize", 0)
    assert names.count("free") == 3
    assert names.index("eventSynchronize") < names.index("eventElapsedTime")
    assert names.count("eventDestroy") == names.count("eventCreate") == 2
    assert names.count("streamDestroy") == 1
    driver.product_later(choice, 1, 2, 3, 4, 5, 6)
    (library,) = opened.products
    assert library.ran[-1][1:] == (1, 2, 3, 4, 5, 6)
    assert (library.ran[-1][0].took, library.opened) == (250_000.0, 1)
    assert driver.make_product(PRODUCT, 1024) == 1
    assert library.warmed == [PRODUCT]
    # The same algorithm is another kernel where operands lie otherwise.
    turned = replace(PRODUCT, transpose_a=True)
    assert (driver.make_product(turned, 1024), driver.make_product(PRODUCT, 2048)) == (2, 3)
    assert library.warmed == [PRODUCT, turned, PRODUCT]
    driver.close()
    assert (library.opened, library.closed) == (1, 1)


@pytest.mark.parametrize("code", [2, 719])
def test_a_product_that_there_is_no_room_to_warm_is_used_cold(opened, code):
    library = Library("")
    library.warmed_code = code
    driver = opened(1, products=lambda path: library)
    if code == 2:
        assert driver.make_product(PRODUCT, 1024) == 0
        return
    with pytest.raises(CudaError):
        driver.make_product(PRODUCT, 1024)


def test_a_missing_library_is_named_with_how_to_install_it(opened):
    libraries = {"find": lambda name: "libnowhere.so.13", "products": CublasLt}
    driver = opened(1, **libraries)
    with raises(DeviceError):
        driver.make_product(PRODUCT, 1024)


class Attention:
    """The library of attention as far as the driver uses it."""

    def __init__(self):
        self.done, self.code = [], 0

    def open(self):
        self.done.append("open")

    def close(self):
        self.done.append("close")

    def choose(self, sdpa, workspace_bytes):
        return sdpa.about, workspace_bytes

    def run(self, choice, addresses, workspace, stream):
        if self.code:
            raise CudaError("no", code=self.code, call="cudnnBackendExecute")
        self.done.append((choice, addresses, workspace, stream))


SDPA = SdpaCall(
    tuple(
        [
            CudnnTensor(name, DType.FLOAT32, (1, 1, 8, 1), (8, 8, 1, 1))
            if name == "lse"
            else CudnnTensor(name, DType.FLOAT16, (1, 1, 8, 8), (64, 64, 8, 1))
            for name in FORWARD
        ]
    ),
    0.5,
    causal=True,
)


def test_attention_is_tried_on_scratch_that_goes_and_run_with_its_choice(driver, opened, modules):
    library = opened.attention
    choice, calls = asked(modules, lambda: driver.make_cudnn(SDPA, 1024))
    assert [c[1] for c in calls if c[0] == "malloc"] == [128, 128, 128, 128, 32, 1024]
    assert [name for name, *_ in calls].count("free") == 6
    tried = library.done.pop()
    assert len(tried[1]) == 5
    driver.cudnn_later(choice, (1, 2, 3, 4, 5), 6, 7)
    assert library.done == ["open", (tried[0], (1, 2, 3, 4, 5), 6, 7)]
    assert driver.make_cudnn(SDPA, 1024) == 1
    driver.close()
    assert (library.done[0], library.done[-1]) == ("open", "close")


def test_attention_that_cannot_run_on_scratch_is_told_at_load(driver, opened):
    opened.attention.code = 5000
    with pytest.raises(CudaError, match="no"):
        driver.make_cudnn(SDPA, 1024)


def test_attention_that_there_is_no_room_to_try_is_used_cold(driver, modules):
    modules.runtime.failing["malloc"] = 2
    assert driver.make_cudnn(SDPA, 1024) == 0
