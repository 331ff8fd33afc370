"""What NCCL is asked for, by a module that notes it as cupy's own would."""

import threading

import pytest

from actors.device.cuda.driver import CudaError
from actors.device.cuda.nccl import Nccl, find_nccl
from actors.kernels.cuda.calls import NCCL_DTYPES, CollectiveKind, RunCollective
from compiler.contract.errors import DeviceError
from compiler.contract.types import DType


class NcclError(Exception):
    """As cupy's errors are: with the code as `status`."""

    def __init__(self, status):
        super().__init__(f"NCCL_ERROR {status}")
        self.status = status


class Library:
    """cupy.cuda.nccl, whose calls are noted; `failing` names a call that fails, and its code."""

    NcclError = NcclError

    def __init__(self):
        self.calls, self.failing, self.threads = [], {}, {}
        self.blocks = threading.Event()
        self.blocks.set()

    def note(self, name, *given):
        self.calls.append((name, *given))
        self.threads[name] = threading.current_thread()
        self.blocks.wait(60)
        if name in self.failing:
            raise NcclError(self.failing[name])

    def get_unique_id(self):
        self.note("get_unique_id")
        return bytes(range(128))

    def groupStart(self):
        self.note("groupStart")

    def groupEnd(self):
        self.note("groupEnd")

    def NcclCommunicator(self, *given):
        self.note("NcclCommunicator", *given)
        return Communicator(self)


class Communicator:
    def __init__(self, library):
        self._library = library

    def __getattr__(self, name):
        return lambda *given: self._library.note(name, *given)


@pytest.fixture
def library():
    made = Library()
    yield made
    made.blocks.set()  # whoever waits


@pytest.fixture
def opened(library):
    """NCCL with one communicator of three ranks; what was asked for it is forgotten."""
    made = Nccl(library, lambda: library.calls.append(("enter",)))
    assert made.join(bytes(128), 3, 1, 60.0) == 0
    library.calls.clear()
    return made


def test_a_communicator_is_joined_on_a_thread_of_its_own_on_the_gpu(library):
    made = Nccl(library, lambda: library.calls.append(("enter",)))
    unique_id = made.unique_id()
    assert unique_id == bytes(range(128))
    assert made.join(unique_id, 3, 1, 60.0) == 0
    assert library.calls[1:] == [("enter",), ("NcclCommunicator", 3, unique_id, 1)]
    assert library.threads["NcclCommunicator"] is not threading.current_thread()


def test_a_rank_that_does_not_come_is_an_error_at_the_deadline(library):
    library.blocks.clear()
    with pytest.raises(CudaError, match=r"not all of 3 ranks came within 0\.01 s") as caught:
        Nccl(library, lambda: None).join(bytes(128), 3, 1, 0.01)
    assert caught.value.call == "ncclCommInitRank"


def test_what_the_library_refuses_is_an_error_with_its_code(library, opened):
    library.failing = {"NcclCommunicator": 5, "allReduce": 4, "check_async_error": 6}
    reduce = RunCollective(CollectiveKind.ALL_REDUCE, 0, 1, 2, (7,), DType.FLOAT32, "sum")
    for call, code in (
        (lambda: opened.join(bytes(128), 3, 1, 60.0), 5),
        (lambda: opened.run(reduce, 9), 4),
        (lambda: opened.check(0), 6),
    ):
        with pytest.raises(CudaError, match=f"NCCL_ERROR {code}") as caught:
            call()
        assert (caught.value.code, caught.value.call[:4]) == (code, "nccl")


RUNS = {
    "sum": (
        (CollectiveKind.ALL_REDUCE, (7,), DType.FLOAT32, "sum"),
        [("allReduce", 1000, 2000, 7, 7, 0, 9)],
    ),
    "extremes": (
        (CollectiveKind.ALL_REDUCE, (7,), DType.BFLOAT16, "max"),
        [("allReduce", 1000, 2000, 7, 9, 2, 9)],
    ),
    "even parts of a sum": (
        (CollectiveKind.REDUCE_SCATTER, (4, 4, 4), DType.FLOAT64, "min"),
        [("reduceScatter", 1000, 2000, 4, 8, 3, 9)],
    ),
    "even parts": (
        (CollectiveKind.ALL_GATHER, (4, 4, 4), DType.UINT8),
        [("allGather", 1000, 2000, 4, 1, 9)],
    ),
    "uneven parts of a sum": (
        (CollectiveKind.REDUCE_SCATTER, (3, 2, 2), DType.FLOAT32, "sum"),
        [
            ("groupStart",),
            ("reduce", 1000, 2000, 3, 7, 0, 0, 9),
            ("reduce", 1012, 2000, 2, 7, 0, 1, 9),
            ("reduce", 1020, 2000, 2, 7, 0, 2, 9),
            ("groupEnd",),
        ],
    ),
    "uneven parts": (
        (CollectiveKind.ALL_GATHER, (3, 2, 2), DType.INT64),
        [
            ("groupStart",),
            ("broadcast", 1000, 2000, 3, 4, 0, 9),
            ("broadcast", 1000, 2024, 2, 4, 1, 9),
            ("broadcast", 1000, 2040, 2, 4, 2, 9),
            ("groupEnd",),
        ],
    ),
    "an exchange": (
        (CollectiveKind.EXCHANGE, (2, 0, 2), DType.FLOAT16, "", (0, 1, 3)),
        [
            ("groupStart",),
            ("send", 1000, 2, 6, 0, 9),
            ("send", 1004, 2, 6, 2, 9),
            ("recv", 2000, 1, 6, 1, 9),
            ("recv", 2002, 3, 6, 2, 9),
            ("groupEnd",),
        ],
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_call_asks_for_what_it_says(library, opened, name):
    (kind, counts, dtype, *rest), expected = RUNS[name]
    opened.run(RunCollective(kind, 0, 1000, 2000, counts, dtype, *rest), 9)
    assert library.calls == expected


def test_a_group_that_fails_is_closed(library, opened):
    library.failing = {"send": 4}
    exchange = RunCollective(CollectiveKind.EXCHANGE, 0, 0, 0, (1, 0, 0), DType.INT8, "", (0,) * 3)
    with pytest.raises(CudaError):
        opened.run(exchange, 9)
    assert library.calls[-1] == ("groupEnd",)


def test_an_abort_is_not_waited_for_and_comes_once(library, opened):
    library.blocks.clear()
    opened.abort(0)
    opened.abort(0)
    opened.check(0)  # asks nothing of one that is gone
    library.blocks.set()
    opened.close()
    assert library.calls == [("enter",), ("abort",)]
    assert library.threads["abort"] is not threading.current_thread()


def test_all_communicators_end_with_the_driver(library, opened):
    opened.join(bytes(128), 3, 1, 60.0)
    library.calls.clear()
    opened.close()
    assert library.calls.count(("abort",)) == 2


@pytest.mark.parametrize("missing", ["module", "library"])
def test_what_is_missing_is_said_with_the_command(missing):
    def imported(name):
        if missing == "module":
            raise ImportError("no module called cupy")
        return type("Empty", (), {"available": False})

    with pytest.raises(DeviceError, match=r"several GPUs need NCCL, .*actorflow\[cuda,nccl\]"):
        find_nccl(imported)


@pytest.mark.parametrize(("number", "dtype"), [*enumerate(NCCL_DTYPES)], ids=str)
def test_every_type_has_its_number_in_nccl(library, opened, number, dtype):
    """nccl.h: int8, uint8, int32, uint32, int64, uint64, half, float, double, bfloat16."""
    opened.run(RunCollective(CollectiveKind.ALL_GATHER, 0, 1, 2, (5,) * 3, dtype), 9)
    assert library.calls == [("allGather", 1, 2, 5, number, 9)]
    assert dtype.is_integer == (number < 6)
