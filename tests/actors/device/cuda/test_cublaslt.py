"""Descriptors of the real library say what the record of a product says."""

import ctypes
import dataclasses
import gc

import pytest

from actors.device.cuda import cublaslt
from actors.device.cuda.cublaslt import LIBRARY, CublasLt, ProductChoices
from actors.device.cuda.driver import CudaError
from actors.kernels.cuda.calls import LtEpilogue, LtLayout, LtProduct
from actors.kernels.cuda.nvrtc import find_library
from compiler.contract.types import DType

F32, F64, F16, BF16 = DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16


@pytest.fixture
def all_tried(monkeypatch):
    """Let products of any length be timed."""
    monkeypatch.setattr(cublaslt, "_LEAST_TRIED", 0)


@pytest.fixture(scope="module")
def library():
    try:
        return CublasLt(find_library(LIBRARY))
    except OSError as error:
        pytest.skip(f"the extra [cuda] is not installed: {error}")


def product(dtype=F32, out=None, **changes):
    plain = LtProduct(
        LtLayout(dtype, 5, 3, 8, 24, 4),
        LtLayout(dtype, 3, 7, 3, 0, 2),
        LtLayout(out or dtype, 5, 7, 6, 42, 256),
        transpose_a=False,
        transpose_b=False,
        batch=4,
        compute=F64 if dtype is F64 else F32,
    )
    return dataclasses.replace(plain, **changes)


RECORDS = {
    "float32": product(),
    "float64": product(F64),
    "float16": product(F16),
    "bfloat16": product(BF16),
    "bfloat16 to float32": product(BF16, F32, beta=1.0),
    "transposed": product(a=LtLayout(F32, 3, 5, 9), transpose_a=True, batch=1),
    "both": product(
        a=LtLayout(F32, 3, 5, 9), b=LtLayout(F32, 7, 3, 11, 80), transpose_a=True, transpose_b=True
    ),
    "deterministic": product(is_deterministic=True),
    "wide": product(d=LtLayout(F32, 5, 7, 1 << 33, 1 << 36, 1)),
    "bias": product(BF16, epilogue=LtEpilogue.BIAS, bias=0x1000),
    "gelu": product(BF16, epilogue=LtEpilogue.GELU_AUX_BIAS, bias=64, aux=0x2000, aux_stride=8),
    "dgelu": product(BF16, epilogue=LtEpilogue.DGELU_BGRAD, bias=64, aux=1 << 40, aux_stride=16),
    "dgelu alone": product(BF16, epilogue=LtEpilogue.DGELU, aux=1 << 40, aux_stride=16),
    "gelu alone": product(F32, epilogue=LtEpilogue.GELU_AUX, aux=1 << 40, aux_stride=16),
    "bias in float32": product(BF16, epilogue=LtEpilogue.BIAS, bias=0x1000, bias_dtype=F32),
    "sums": product(epilogue=LtEpilogue.BGRAD_B, bias=0x100),
}


@pytest.mark.cuda
@pytest.mark.parametrize("name", RECORDS)
def test_descriptors_read_back_as_the_record_they_were_made_of(library, name):
    made = library.describe(RECORDS[name], 32 << 20)
    assert library.read_back(made) == RECORDS[name]


@pytest.mark.cuda
def test_an_aux_of_another_type_is_told_when_it_is_read_back(library):
    made = library.describe(RECORDS["gelu"], 0)
    library._set("MatmulDesc", made.product, [(22, ctypes.c_int32, 0)])
    with pytest.raises(CudaError, match="aux is of another type"):
        library.read_back(made)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "fault",
    [
        {"transpose_b": True},
        {"beta": 1.0},
        {"d": LtLayout(F32, 5, 7, 7, 42, 256)},
        {"batch": 5},
        {"compute": F64},
    ],
    ids=lambda fault: next(iter(fault)),
)
def test_a_record_that_differs_reads_back_otherwise(library, fault):
    assert library.read_back(library.describe(product(**fault), 0)) != product()


@pytest.mark.cuda
def test_descriptors_are_given_back_with_their_object(library, monkeypatch):
    given = []
    monkeypatch.setattr(cublaslt, "_destroy", lambda lib, handles: given.extend(handles))
    made = library.describe(product(), 0)
    handles = {made.product, made.preference, *made.layouts}
    del made
    gc.collect()
    assert {handle for _, handle in given} == handles


@pytest.mark.cuda
def test_the_version_is_of_cuda_13(library):
    assert library.version >= 130_000


class NoTrial:
    def scratch(self, sizes_bytes):
        raise AssertionError("nothing is to be timed")

    def duration_ns(self, run):
        raise AssertionError("nothing is to be timed")


@pytest.mark.cuda
def test_without_a_gpu_an_algorithm_is_an_error_that_names_call_and_product(library):
    with pytest.raises(CudaError, match="no algorithm for the product NN 4; float32 5x3") as caught:
        library.choose(product(), 4096, NoTrial(), ProductChoices(None, "here"))
    assert caught.value.call == "cublasLtMatmulAlgoGetHeuristic"
    assert "4,096 bytes of workspace" in str(caught.value)


class NoRoom(NoTrial):
    def scratch(self, sizes_bytes):
        raise CudaError("no bytes are left", code=2, call="malloc")


@pytest.mark.cuda
@pytest.mark.usefixtures("all_tried")
def test_where_there_is_no_room_to_try_the_first_is_taken_and_not_kept(library, monkeypatch):
    offering(library, monkeypatch, FIRST, SECOND)
    choices = ProductChoices(None, "here")
    assert library.choose(product(), 0, NoRoom(), choices).algorithm == FIRST
    trial = Trials({FIRST: [3e4] * 3, SECOND: [2e4] * 3})
    assert library.choose(product(), 0, trial, choices).algorithm == SECOND
    again = Trials({SECOND: [2.0] * 3})
    library.warm(product(), library.choose(product(), 0, NoTrial(), choices), again)
    assert [run.args[0].algorithm for run in again.runs] == [SECOND] * 3


@pytest.mark.cuda
def test_a_choice_that_is_kept_is_not_made_again(library, tmp_path):
    record = product()
    choices = ProductChoices(tmp_path, "library 1 on a GPU")
    choices.keep(f"{record.key}; in 64", bytes(range(64)))
    found = library.choose(record, 64, NoTrial(), ProductChoices(tmp_path, "library 1 on a GPU"))
    assert found.algorithm == bytes(range(64))


class Trials:
    """A clock that gives times as told, and refuses algorithms."""

    def __init__(self, times, refused=()):
        self.times, self.refused, self.runs = times, refused, []

    def scratch(self, sizes_bytes):
        self.sizes = sizes_bytes
        return tuple([(i + 1) << 32 for i in range(len(sizes_bytes))])

    def duration_ns(self, run):
        algorithm = run.args[0].algorithm
        self.runs.append(run)
        if algorithm in self.refused:
            raise CudaError("not supported", code=15, call="cublasLtMatmul")
        return self.times[algorithm].pop()


def offering(library, monkeypatch, *algorithms):
    monkeypatch.setattr(library, "_candidates", lambda *given: list(algorithms))


FIRST, SECOND, THIRD = (bytes([n] * 64) for n in (1, 2, 3))


@pytest.mark.cuda
@pytest.mark.usefixtures("all_tried")
def test_the_fastest_by_the_median_of_three_is_kept(library, monkeypatch, tmp_path):
    offering(library, monkeypatch, FIRST, SECOND, THIRD)
    trial = Trials({FIRST: [5e4, 5e4, 1e4], SECOND: [9e4, 3e4, 3e4]}, refused=(THIRD,))
    choices = ProductChoices(tmp_path, "here")
    assert library.choose(product(), 0, trial, choices).algorithm == SECOND
    assert library.choose(product(), 0, NoTrial(), choices).algorithm == SECOND
    assert len(trial.runs) == 7


@pytest.mark.cuda
@pytest.mark.usefixtures("all_tried")
@pytest.mark.parametrize(("first", "second"), [(4e3, 2.5e3), (1.015e7, 1e7)])
def test_of_algorithms_that_take_about_as_long_the_first_is_kept(
    library, monkeypatch, first, second
):
    offering(library, monkeypatch, FIRST, SECOND)
    trial = Trials({FIRST: [first] * 3, SECOND: [second] * 3})
    choices = ProductChoices(None, "here")
    assert library.choose(product(), 0, trial, choices).algorithm == FIRST


@pytest.mark.cuda
@pytest.mark.usefixtures("all_tried")
def test_where_every_algorithm_fails_the_error_is_the_last_one(library, monkeypatch):
    offering(library, monkeypatch, FIRST, SECOND)
    with pytest.raises(CudaError, match="not supported"):
        library.choose(product(), 0, Trials({}, (FIRST, SECOND)), ProductChoices(None, "here"))


@pytest.mark.cuda
def test_a_short_product_takes_the_first_that_runs(library, monkeypatch):
    offering(library, monkeypatch, FIRST, SECOND, THIRD)
    trial = Trials({SECOND: [9e4] * 3, THIRD: [1e4] * 3}, refused=(FIRST,))
    choices = ProductChoices(None, "here")
    assert library.choose(product(), 0, trial, choices).algorithm == SECOND
    assert len(trial.runs) == 4


@pytest.mark.cuda
def test_a_deterministic_product_takes_the_first(library, monkeypatch):
    offering(library, monkeypatch, FIRST, SECOND)
    record = product(is_deterministic=True)
    choice = library.choose(record, 0, NoTrial(), ProductChoices(None, "here"))
    assert choice.algorithm == FIRST


@pytest.mark.cuda
def test_a_trial_writes_nothing_but_scratch(library, monkeypatch):
    offering(library, monkeypatch, FIRST)
    record, trial = RECORDS["gelu"], Trials({FIRST: [1.0] * 3})
    library.choose(record, 128, trial, ProductChoices(None, "here"))
    tried = library.read_back(trial.runs[0].args[0].descriptors)
    assert (tried.bias, tried.aux) == (4 << 32, 5 << 32)
    d = record.d
    spans = [(3 * 24 + 2 * 8 + 5) * 2, (6 * 3 + 3) * 2, (3 * 42 + 6 * 6 + 5) * 2]
    assert trial.sizes == (*spans, 2 * d.columns, 2 * record.aux_stride * d.columns, 128)
    assert tried == dataclasses.replace(record, bias=tried.bias, aux=tried.aux)
