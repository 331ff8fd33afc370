"""The emulated driver: late as CUDA may be, and strict about what CUDA forbids."""

import ctypes
from random import Random

import numpy as np
import pytest

from actors.device.cuda.driver import CudaError
from actors.device.cuda.memory import argument_block
from actors.kernels.cuda.calls import KernelText, LtLayout, LtProduct
from actors.kernels.cuda.kernel import gpu_named
from actors.testing.emulated.driver import EmulatedCuda, EmulatedDriver
from actors.testing.simulated import LateSchedule
from compiler.contract.types import DType

ADD = KernelText.of(
    "af_add",
    """
typedef struct { af_word w[3]; } NAME_arguments;
AF_KERNEL NAME(AF_ARGUMENTS(NAME) arguments) {
    int64_t *x = (int64_t *)arguments.w[0].p + arguments.w[2].i;
    if (AF_THREAD == 0) *x = *x * 10 + arguments.w[1].i;
}
""",
    ("NAME",),
    "a digit more",
    has_exchanges=False,
)
HANGING = KernelText.of(
    "af_hang",
    """
typedef struct { af_word w[1]; } NAME_arguments;
AF_KERNEL NAME(AF_ARGUMENTS(NAME) arguments) {
    if (AF_THREAD > 3) AF_BARRIER();
}
""",
    ("NAME",),
    "some wait",
)


@pytest.fixture
def make_driver(native_toolchain):
    """Return a function that makes a driver, late by a seed, and checks that all is given back."""
    made = []

    def make(seed=0, index=0, cuda=None, **options):
        cuda = cuda or EmulatedCuda(LateSchedule(Random(seed)))
        driver = EmulatedDriver(
            cuda, native_toolchain, gpu_named("h200"), index, seed=seed, **options
        )
        driver.load([ADD, HANGING])
        made.append(driver)
        return driver

    yield make
    for driver in made:
        driver.close()


@pytest.fixture
def driver(make_driver):
    return make_driver()


def at(driver, address, count=1):
    out = np.zeros(count, np.int64)
    driver.copy(out.ctypes.data, address, out.nbytes)
    return [int(x) for x in out]


def fresh(driver, count=1, value=0):
    address, zeros = driver.allocate(8 * count), np.full(count, value)
    driver.copy(address, zeros.ctypes.data, zeros.nbytes)
    return address


def add(driver, stream, address, digit, index=0, text=ADD, **changed):
    block = argument_block((address, digit, index)[: 1 if text is HANGING else 3])
    call = {"num_blocks": 1, "num_threads": 32, "shared_bytes": 0, "num_words": len(block)}
    call |= changed
    driver.launch_later(
        driver.function(text, text.kernels[0]),
        words=ctypes.addressof(block),
        stream=stream,
        **call,
    )
    ctypes.memset(block, 0xFF, 8 * len(block))  # it was read at once


def fails(code, call, *arguments, **options):
    with pytest.raises(CudaError) as caught:
        call(*arguments, **options)
    assert caught.value.code == code, caught.value
    return str(caught.value)


def test_a_forked_child_opens_no_gpu_where_its_parent_had_one(make_driver, child_says):
    make_driver()
    text = child_says(lambda: make_driver(index=1))
    assert text.startswith("DeviceError: cuda:1 cannot be opened in process ")
    assert "forked from a process that uses CUDA" in text
    assert text.endswith("Start the process with multiprocessing's 'spawn'")


def test_a_stream_keeps_its_order_and_is_late(make_driver):
    was_late = 0
    for seed in range(20):
        driver = make_driver(seed)
        stream, x = driver.make_stream("s"), fresh(driver)
        for digit in (1, 2, 3):
            add(driver, stream, x, digit)
        was_late += at(driver, x) != [123]
        driver.synchronize()
        assert at(driver, x) == [123]
    assert was_late > 5


def test_streams_are_ordered_by_events_alone(make_driver):
    seen = set()
    for seed in range(30):
        driver = make_driver(seed)
        one, two = driver.make_stream("one"), driver.make_stream("two")
        event, x = driver.make_event(), fresh(driver, 2)
        driver.wait(two, event)  # never recorded: no wait
        add(driver, one, x, 1)
        driver.record(event, one)
        driver.wait(two, event)
        add(driver, one, x, 2, 1)
        add(driver, two, x, 3)
        add(driver, two, x, 4, 1)
        driver.record(event, two)
        driver.synchronize_event(event)
        assert driver.is_done(event)
        assert at(driver, x) == [13]
        driver.synchronize()
        seen.add(at(driver, x, 2)[1])
    assert seen == {24, 42}


def test_memory_means_nothing_and_has_an_end(driver):
    x, pinned = driver.allocate(16), driver.allocate_pinned(16)
    stream = driver.make_stream("s")
    assert at(driver, x, 2) == [-1, -1]
    assert x % 256 == pinned % 256 == 0
    driver.fill_later(x, 7, 16, stream)
    driver.copy_later(pinned, x, 16, stream)
    driver.synchronize()
    assert bytes(ctypes.string_at(pinned, 16)) == b"\7" * 16
    fails(1, driver.fill_later, x, 0, 17, stream)
    fails(1, driver.copy_later, pinned, x + 8, 9, stream)
    fails(1, driver.copy, x, pinned, 17)
    fails(1, driver.free, pinned)
    fails(1, driver.free, x + 8)
    fails(1, driver.allocate, 0)
    driver.free(x)
    fails(1, driver.free, x)


def test_a_copy_on_a_stream_needs_pinned_memory(driver):
    x, pageable, stream = driver.allocate(64), np.zeros(8), driver.make_stream("s")
    message = fails(1, driver.copy_later, x, pageable.ctypes.data, 64, stream)
    assert "neither of a device nor pinned" in message


def test_memory_ends_where_the_description_says(make_driver):
    driver = make_driver(memory_bytes=1000)
    x = driver.allocate(600)
    assert driver.free_bytes() == 400
    fails(2, driver.allocate, 401)
    driver.free(x)
    assert driver.free_bytes() == 1000
    assert driver.seen().memory_bytes == 1000
    fails(2, make_driver().allocate, 1 << 60)


def test_what_was_not_given_back_is_known_until_the_end(make_driver):
    cuda = EmulatedCuda(LateSchedule(Random(0)))
    driver, other = make_driver(cuda=cuda), make_driver(cuda=cuda, index=1)
    x, pinned = driver.allocate(8), driver.allocate_pinned(8)
    driver.free(driver.allocate(8))
    kept = other.allocate(8)
    assert {block.address for block in cuda.memory.of(driver)} == {x, pinned}
    driver.close()
    assert not cuda.memory.of(driver)
    assert [block.address for block in cuda.memory.of(other)] == [kept]


def test_a_write_beside_memory_is_a_fault_that_stays(driver):
    x, stream = fresh(driver), driver.make_stream("s")
    add(driver, stream, x, 1, index=1)
    message = fails(700, driver.synchronize)
    assert "wrote outside 8 bytes of device memory" in message
    assert ADD.kernels[0] in message
    event = driver.make_event()
    fails(700, driver.record, event, stream)
    fails(700, driver.fill_later, x, 0, 8, stream)
    fails(700, driver.allocate, 8)
    fails(700, driver.synchronize)


def test_memory_freed_too_early_is_a_bad_address(driver):
    x, stream = driver.allocate(8), driver.make_stream("s")
    driver.begin_capture(stream)
    driver.fill_later(x, 0, 8, stream)
    graph = driver.end_capture(stream)
    driver.free(x)

    def run():
        driver.graph_later(graph, stream)
        driver.synchronize()

    fails(700, run)


def test_threads_that_would_hang_are_a_failure_of_the_launch(driver):
    add(driver, driver.make_stream("s"), 0, 0, text=HANGING)
    assert "ended while others" in fails(719, driver.synchronize)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_threads": 33},
        {"num_threads": 0},
        {"num_threads": 1056},
        {"num_blocks": 0},
        {"shared_bytes": 1 << 20},
        {"num_words": 2},
    ],
)
def test_a_launch_that_cannot_be_is_refused(driver, wrong):
    stream, x = driver.make_stream("s"), fresh(driver)
    fails(1, add, driver, stream, x, 1, **wrong)
    driver.synchronize()


@pytest.mark.parametrize(
    ("sort", "num_words", "num_threads", "is_taken"),
    [
        ("AF_KERNEL", 4095, 1024, True),
        ("AF_KERNEL", 4096, 1024, False),
        ("AF_KERNEL_UP_TO(256)", 1, 256, True),
        ("AF_KERNEL_UP_TO(256)", 1, 288, False),
    ],
)
def test_a_launch_has_the_arguments_and_threads_that_its_kernel_may_have(
    driver, sort, num_words, num_threads, is_taken
):
    body = "if (AF_THREAD < 0) *(int32_t *)arguments.w[0].p = 0;"
    struct = f"typedef struct {{ af_word w[{num_words}]; }} NAME_arguments;\n"
    kernel = f"{sort} NAME(AF_ARGUMENTS(NAME) arguments) {{ {body} }}\n"
    text = KernelText.of("limits", struct + kernel, ("NAME",), "of a test")
    driver.load([text])
    block, stream = (ctypes.c_uint64 * num_words)(), driver.make_stream("s")
    given = (driver.function(text, text.kernels[0]), 1, num_threads, 0)
    words = (ctypes.addressof(block), num_words, stream)
    if is_taken:
        driver.launch_later(*given, *words)
        driver.synchronize()
    else:
        fails(1, driver.launch_later, *given, *words)


def test_handles_are_what_they_were_made_as(driver):
    stream, event = driver.make_stream("s"), driver.make_event()
    for call in (
        lambda: driver.record(stream, stream),
        lambda: driver.wait(event, event),
        lambda: driver.graph_later(event, stream),
        lambda: driver.begin_capture(0),
    ):
        fails(400, call)
    unknown = KernelText("", ("af_nothing",))
    fails(500, driver.function, unknown, "af_nothing")


def test_a_text_that_cannot_be_compiled_says_why(driver):
    text = KernelText.of("af_bad", "AF_KERNEL NAME(int x) { return y; }", ("NAME",), "wrong")
    assert "undeclared" in fails(218, driver.load, [text])


def test_two_drivers_wait_for_one_another(make_driver):
    for seed in range(20):
        cuda = EmulatedCuda(LateSchedule(Random(seed)))
        one, two = make_driver(seed, cuda=cuda), make_driver(seed, index=1, cuda=cuda)
        x, here, there = fresh(one), one.make_stream("here"), two.make_stream("there")
        event = one.make_event()
        add(one, here, x, 1)
        one.record(event, here)
        two.wait(there, event)
        add(two, there, x, 2)
        two.synchronize()
        assert at(two, x) == [12]


def test_a_fault_is_that_of_its_device(make_driver):
    cuda = EmulatedCuda(LateSchedule(Random(0)))
    one, two = make_driver(cuda=cuda), make_driver(index=1, cuda=cuda)
    add(one, one.make_stream("s"), 0, 0, text=HANGING)
    fails(719, one.synchronize)
    x, stream = fresh(two), two.make_stream("s")
    add(two, stream, x, 5)
    two.synchronize()
    assert at(two, x) == [5]


PLAIN = LtLayout(DType.FLOAT32, 2, 2, 2)


def test_a_product_runs_on_its_stream_and_spoils_its_workspace(driver):
    x, d, scratch = driver.allocate(16), driver.allocate(16), fresh(driver, 8)
    values = np.array([1, 2, 3, 4], np.float32)
    driver.copy(x, values.ctypes.data, 16)
    stream = driver.make_stream("s")
    choice = driver.make_product(LtProduct(PLAIN, PLAIN, PLAIN, False, True), 64)
    driver.product_later(choice, x, x, d, d, scratch, stream)
    driver.synchronize()
    out = np.zeros(4, np.float32)
    driver.copy(out.ctypes.data, d, 16)
    matrix = values.reshape(2, 2).T.astype(np.float64)
    np.testing.assert_array_equal(out.reshape(2, 2).T, matrix @ matrix.T)
    assert at(driver, scratch, 8) == [-1] * 8


def test_a_product_needs_its_workspace(make_driver):
    driver = make_driver(product_bytes=65)
    product = LtProduct(PLAIN, PLAIN, PLAIN, False, False)
    assert "within 64 bytes of workspace" in fails(15, driver.make_product, product, 64)
    driver.make_product(product, 65)


@pytest.mark.parametrize(
    ("moved", "code"),
    [
        ({"a": 20}, 700),
        ({"d": 8}, 700),
        ({"d": -16}, 1),
        ({"workspace": 1 << 12}, 700),
        ({"workspace": 64}, 716),  # the library wants a multiple of 256
    ],
)
def test_operands_of_a_product_lie_where_they_may(driver, moved, code):
    block, stream = driver.allocate(64), driver.make_stream("s")
    places = {"a": block + 32, "b": block + 32, "c": block + 48, "d": block + 48, "workspace": 0}
    places = {name: place + moved.get(name, 0) for name, place in places.items()}
    layout = LtLayout(DType.FLOAT32, 2, 2, 2, alignment=4)
    choice = driver.make_product(LtProduct(layout, layout, layout, False, False), 16)
    driver.product_later(choice, **places, stream=stream)
    fails(code, driver.synchronize)


def test_an_operand_that_lies_as_its_layout_does_not_say_is_found(driver):
    block, stream = driver.allocate(64), driver.make_stream("s")
    choice = driver.make_product(LtProduct(PLAIN, PLAIN, PLAIN, False, False), 0)
    driver.product_later(choice, block + 4, block + 4, block + 32, block + 32, 0, stream)
    assert "multiple of 16" in fails(716, driver.synchronize)
