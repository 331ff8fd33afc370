"""Codes of the driver become families of errors, and sticky ones say what to do."""

import pytest

from actors.device.cuda.driver import STICKY, CudaError, explained, fault_of, is_out_of_memory
from actors.machine.protocol import DeviceFault
from compiler.contract.errors import DeviceError, InternalError, OutOfMemory
from compiler.contract.placement import Device, DeviceKind

HERE = Device(DeviceKind.CUDA, 1)


def error(code, call="graphLaunch"):
    return CudaError("the driver's words", code=code, call=call)


@pytest.mark.parametrize("code", [700, 714, 715, 716, 717, 719])
def test_a_code_that_ends_the_process_says_what_it_means_and_what_to_do(code):
    fault = fault_of(error(code), HERE)
    assert str(fault) == (
        f"cuda:1 failed: {STICKY[code]} (graphLaunch gave {code}: the driver's words). CUDA takes"
        " no further call of this process, which must be started again, from its newest checkpoint;"
        " ACTORFLOW_SYNC=1 runs launch by launch, and names the one that fails"
    )
    assert fault.__cause__.code == code
    assert isinstance(explained(error(code), HERE), DeviceFault)


def test_a_launch_that_is_known_needs_no_second_run():
    assert "ACTORFLOW_SYNC" not in str(fault_of(error(719), HERE, launch=3))


@pytest.mark.parametrize("code", range(900, 909))
def test_what_a_capture_refuses_is_our_bug(code):
    told = explained(error(code), HERE)
    assert isinstance(told, InternalError)
    assert f"a chain cannot be captured on cuda:1: graphLaunch gave {code}" in str(told)


def test_no_memory_and_other_codes():
    assert is_out_of_memory(error(2))
    told = explained(error(2, "cudaGraphInstantiate"), HERE)
    assert isinstance(told, OutOfMemory)
    assert "cuda:1 has no memory left for what CUDA itself needs (cudaGraphInstantiate)" in str(
        told
    )
    assert type(explained(error(1), HERE)) is DeviceError


@pytest.mark.parametrize("code", [2, 700, 901])
def test_codes_of_a_library_are_its_own(code):
    told = error(code, "cublasLtMatmul")
    assert not is_out_of_memory(told)
    assert type(explained(told, HERE)) is DeviceError
