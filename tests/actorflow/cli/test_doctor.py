import json
import os
from dataclasses import replace

import pytest

from actorflow.cli import doctor
from actorflow.cli.doctor import findings
from actorflow.cli.main import main
from actorflow.environment.host import CUDA_PACKAGES, Host
from actorflow.environment.kernel_times import FLOPS, KernelTimes, measured_kernels
from actorflow.environment.settings import ENVIRONMENT, Settings
from actors.device.cuda.cudnn import InstalledCudnn
from actors.device.cuda.nvml import NvmlDevice, NvmlDevices
from actors.kernels.cuda.cudnn_library import CudnnLibrary
from actors.kernels.library.openblas import BlasInfo

FAST = BlasInfo("libscipy_openblas.so", "SkylakeX", 8)
SLOW = BlasInfo("libscipy_openblas.so", "Haswell", 8)
SOUND = Host(
    python=(3, 11, 4),
    system="Linux x86_64",
    packages={"numpy": "2.4.0", "msgpack": "1.2"},
    cuda=NvmlDevices(problem="no NVIDIA driver is here"),
    cuda_packages=dict.fromkeys(CUDA_PACKAGES),
    mpi_packages={"mpi4py": None, "mpich": "5.0.2"},
    blas=FAST,
    free_blas=None,
    compiler="/usr/bin/cc: cc 12.2.0",
    onednn="2023.2.0",
    num_cores=8,
    quota_cores=None,
    memory_bytes=64 * 2**30,
    available_bytes=48 * 2**30,
    busy_cores=0.1,
    cache_is_writable=True,
)
ONE_GPU = NvmlDevices(
    (NvmlDevice("NVIDIA H200", "GPU-1", (9, 0), 140 << 30),), "580.65.06", (13, 0)
)
HOME = {"HOME": "/home/ann"}


def warnings(environ=HOME, **changes):
    """The (text, mend) of every warning."""
    found = findings(environ, replace(SOUND, **changes))
    return [(finding.text, finding.mend) for finding in found if finding.is_warning]


def report_lines(environ, host):
    return [line for finding in findings(environ, host) for line in str(finding).splitlines()]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"num_cores": 1},
            "by actorflow launch -n P: they take turns on one core",
        ),
        ({"quota_cores": 2.5}, "up to 2 have a core each"),
        ({"compiler": None}, "several cannot run here: they need a C compiler"),
        ({"compiler_error": "cc: no stdio.h"}, "several cannot run here: they need a C compiler"),
        (
            {"shares_memory": False},
            "cannot run here: they need memory that processes share (memfd)",
        ),
        (
            {"reaches_loopback": False},
            "they need the loopback device (127.0.0.1), which is down or closed",
        ),
        (
            {"shares_memory": False, "compiler": None},
            "they need memory that processes share (memfd) and a C compiler",
        ),
    ],
)
def test_whether_several_ranks_can_run_is_one_line_and_no_warning(changes, text):
    found = [f for f in findings(HOME, replace(SOUND, **changes)) if f.topic == "ranks"]
    assert text in found[0].text
    assert [f.is_warning for f in found] == [False]


def test_a_sound_machine_has_no_warning():
    assert warnings() == []
    assert report_lines(HOME, SOUND) == [
        "ok   python      3.11.4 on Linux x86_64",
        "ok   numpy       2.4.0",
        "ok   msgpack     1.2",
        "ok   blas        libscipy_openblas.so: SkylakeX kernels, 8 threads",
        "ok   compiler    /usr/bin/cc: cc 12.2.0",
        "ok   onednn      2023.2.0",
        "ok   cores       8 available",
        "ok   load        other processes use 0.1 cores",
        "ok   ranks       several can run here, by actorflow launch -n P: up to 8 have a core each",
        "ok   mpi4py      is not installed: ranks on several hosts would need it (extra [mpi])",
        "ok   mpich       5.0.2",
        "ok   ram         48.0 GiB available of 64.0 GiB",
        "ok   gpu         no NVIDIA driver is here; plans for one are made with --gpu, and can"
        " run emulated, slowly",
        "ok   cupy-cuda13x is not installed: a GPU would need it (extra [cuda])",
        "ok   nvidia-cuda-nvrtc is not installed: a GPU would need it (extra [cuda])",
        "ok   nvidia-cuda-runtime is not installed: a GPU would need it (extra [cuda])",
        "ok   nvidia-cublas is not installed: a GPU would need it (extra [cuda])",
        "ok   nvidia-cudnn-frontend is not installed: cuDNN on a GPU would need it (extra [cudnn])",
        "ok   cuda-bindings is not installed: cuDNN on a GPU would need it (extra [cudnn])",
        "ok   nvidia-nccl-cu13 is not installed: ranks on GPUs would need it (extra [nccl])",
        "ok   cudnn       is not installed: cuDNN on a GPU would need it (extra [cudnn])",
        "ok   cache       /home/ann/.cache/actorflow, writable",
    ]


def test_a_warning_is_followed_by_its_mend():
    lines = report_lines(HOME, replace(SOUND, packages={"msgpack": None}))
    assert lines[1:3] == [
        "warn msgpack     is not installed",
        "                 -> python -m pip install msgpack",
    ]


def test_a_core_type_that_holds_the_machine_back_is_named_with_both_kernels():
    environ = {**HOME, "OPENBLAS_CORETYPE": "Haswell"}
    assert warnings(environ, blas=SLOW, free_blas=FAST) == [
        (
            "OPENBLAS_CORETYPE=Haswell holds numpy to the Haswell kernels; without it numpy takes"
            " the SkylakeX kernels",
            "unset OPENBLAS_CORETYPE",
        )
    ]


def test_a_core_type_that_changes_nothing_is_no_warning():
    assert warnings({**HOME, "OPENBLAS_CORETYPE": "SkylakeX"}, free_blas=FAST) == []


def test_a_core_type_is_warned_of_if_the_child_could_not_tell():
    ((text, mend),) = warnings({**HOME, "OPENBLAS_CORETYPE": "Haswell"}, blas=SLOW)
    assert text.endswith("without it numpy takes what this processor has")
    assert mend == "unset OPENBLAS_CORETYPE"


@pytest.mark.parametrize("name", ["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "GOTO_NUM_THREADS"])
def test_fewer_threads_than_the_machine_gives_are_named_with_the_variable(name):
    ((text, mend),) = warnings(
        {**HOME, name: "1"}, blas=replace(FAST, num_threads=1), free_blas=FAST
    )
    assert text == f"{name}=1 holds numpy to 1 thread; without it numpy takes 8 threads"
    assert mend.startswith(f"unset {name}, unless")


def test_more_threads_than_cores_are_named_too():
    ((text, _),) = warnings(
        {**HOME, "OMP_NUM_THREADS": "64"}, blas=replace(FAST, num_threads=64), free_blas=FAST
    )
    assert text.startswith("OMP_NUM_THREADS=64 drives numpy to 64 threads")


def test_as_many_threads_as_the_machine_gives_are_no_warning():
    assert warnings({**HOME, "OMP_NUM_THREADS": "8"}, free_blas=FAST) == []


def test_an_exported_cache_size_is_named():
    ((text, mend),) = warnings({**HOME, "OPENBLAS_L2_SIZE": "262144"}, free_blas=FAST)
    assert text.startswith("OPENBLAS_L2_SIZE=262144 overrides")
    assert mend == "unset OPENBLAS_L2_SIZE"


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, "not recognised: its kernels are unknown"),
        (BlasInfo("libmkl_rt.so", None, None), "libmkl_rt.so, not OpenBLAS: its kernels are"),
    ],
)
def test_another_blas_is_told_and_not_warned_of(found, text):
    environ = {**HOME, "OPENBLAS_CORETYPE": "Haswell"}
    assert warnings(environ, blas=found) == []
    assert any(text in line for line in report_lines(environ, replace(SOUND, blas=found)))


def test_a_container_with_less_than_it_shows_is_named():
    assert warnings(quota_cores=2.5) == [
        (
            "8 are visible, and the container may use 2.5",
            "set ACTORFLOW_THREADS=2, or give the container more",
        )
    ]
    assert "ACTORFLOW_THREADS=1," in warnings(quota_cores=0.5)[0][1]
    assert warnings(quota_cores=8.0) == []


def test_other_busy_processes_are_named_and_no_fault_of_the_machine():
    assert warnings(busy_cores=3.4) == []
    lines = report_lines(HOME, replace(SOUND, busy_cores=3.4))
    (at,) = [i for i, line in enumerate(lines) if line.startswith("note load ")]
    assert "other processes use 3.4 of 8 cores" in lines[at]
    assert "ACTORFLOW_THREADS" in lines[at + 1]


def test_little_memory_is_named():
    ((text, mend),) = warnings(available_bytes=2**29)
    assert text == "0.5 GiB available of 64.0 GiB"
    assert "memory_budget=" in mend


def test_a_system_that_tells_nothing_is_no_warning():
    assert warnings(memory_bytes=None, available_bytes=None, busy_cores=None, blas=None) == []


def test_a_machine_without_a_gpu_says_what_can_be_done_without_one():
    assert (
        "ok   gpu         no NVIDIA driver is here; plans for one are made with --gpu, and can"
        " run emulated, slowly"
    ) in report_lines(HOME, SOUND)


def test_a_gpu_with_all_that_it_needs_has_no_warning():
    cudnn = InstalledCudnn("/there/libcudnn.so.9", CudnnLibrary((9, 27), is_jit=True))
    packages = dict.fromkeys(SOUND.cuda_packages, "14.2")
    host = replace(SOUND, cuda=ONE_GPU, cuda_packages=packages, cudnn=cudnn)
    assert report_lines(HOME, host)[12:22] == [
        "ok   gpu         driver 580.65.06, which serves CUDA 13.0",
        "ok   cuda:0      NVIDIA H200, 140.0 GiB, 9.0",
        "ok   cupy-cuda13x 14.2",
        "ok   nvidia-cuda-nvrtc 14.2",
        "ok   nvidia-cuda-runtime 14.2",
        "ok   nvidia-cublas 14.2",
        "ok   nvidia-cudnn-frontend 14.2",
        "ok   cuda-bindings 14.2",
        "ok   nvidia-nccl-cu13 14.2",
        "ok   cudnn       9.27, the small one, which compiles its kernels (/there/libcudnn.so.9)",
    ]


def test_a_cudnn_that_is_too_old_is_named_with_the_oldest_that_is_used():
    cudnn = InstalledCudnn("/there/libcudnn.so.9", CudnnLibrary((9, 10)))
    assert (
        "ok   cudnn       9.10, the whole one (/there/libcudnn.so.9); 9.19 is the oldest used"
        in report_lines(HOME, replace(SOUND, cudnn=cudnn))
    )


def test_a_gpu_wants_the_packages_of_its_extra():
    assert (
        warnings(cuda=ONE_GPU)
        == [("is not installed", "python -m pip install 'actorflow[cuda]'")] * 4
    )


def test_a_driver_of_cuda_12_and_a_gpu_without_a_description_are_to_be_mended():
    old = replace(ONE_GPU, cuda=(12, 8), gpus=())
    assert warnings(cuda=old) == [
        (
            "the driver 580.65.06 serves CUDA 12.8, jobs on cuda need 13.0",
            "install an NVIDIA driver of version 580 or later",
        )
    ]
    other = replace(ONE_GPU, gpus=(NvmlDevice("NVIDIA T4", "GPU-9", (7, 5), 16 << 30),))
    [(text, mend), *_] = warnings(cuda=other)
    assert text == "NVIDIA T4, 16.0 GiB, 7.5"
    assert "which has no description" in mend


def test_a_cache_that_cannot_be_written_is_named():
    ((text, mend),) = warnings(cache_is_writable=False)
    assert text == "/home/ann/.cache/actorflow, cannot be written"
    assert "ACTORFLOW_CACHE" in mend


def test_a_cache_that_is_off_is_told():
    lines = report_lines({"ACTORFLOW_CACHE": "off"}, SOUND)
    assert "ok   cache       off: every start compiles again" in lines


def test_settings_in_force_are_listed_with_their_meaning():
    lines = report_lines({**HOME, "ACTORFLOW_VERIFY": "1", "ACTORFLOW_LOG": ""}, SOUND)
    shown = [line for line in lines if "ACTORFLOW_" in line]
    (meaning,) = [v.meaning for v in ENVIRONMENT if v.name == "ACTORFLOW_VERIFY"]
    assert shown == [f"ok   setting     ACTORFLOW_VERIFY=1: {meaning}"]


def test_settings_that_mean_nothing_are_warnings():
    ((text, _),) = warnings({**HOME, "ACTORFLOW_LOG": "inof"})
    assert "did you mean info?" in text
    ((text, _),) = warnings({**HOME, "ACTORFLOW_LGO": "info"})
    assert "did you mean ACTORFLOW_LOG?" in text


@pytest.mark.parametrize(("seen", "code"), [(SOUND, 0), (replace(SOUND, compiler=None), 1)])
def test_the_exit_code_tells_whether_something_is_to_be_mended(monkeypatch, capsys, seen, code):
    monkeypatch.setattr(doctor, "examine", lambda environ: seen)
    environ = {**HOME, "ACTORFLOW_NATIVE": "0"}
    monkeypatch.setattr(os, "environ", environ)
    assert main(["doctor"]) == code
    told = capsys.readouterr().out.splitlines()
    (measured,) = [line for line in told if line.startswith("ok   kernels")]
    assert measured.endswith("by numpy's kernels")
    assert [line for line in told if line != measured] == report_lines(environ, seen)
    assert main(["doctor", "--json"]) == code
    rows = [doctor.Finding(**row) for row in json.loads(capsys.readouterr().out)]
    assert [row for row in rows if row.topic != "kernels"] == doctor.findings(environ, seen)


def test_no_compiler_says_what_it_costs_and_how_to_get_one():
    ((text, mend),) = warnings(compiler=None)
    assert text.startswith("no cc, gcc or clang: numpy's kernels run, and a step of a small GPT")
    assert "apt install gcc" in mend


def test_what_native_kernels_gain_is_told_as_it_was_measured():
    times = KernelTimes({"convolution": 9.437184, "product": 2.68435456}, {})
    told = [str(finding) for finding in findings(HOME, SOUND, times)]
    slow = "1 GFLOP/s in a convolution, 100 GFLOP/s in a product, by numpy's kernels"
    assert f"ok   kernels     {slow}" in told
    times = KernelTimes(times.numpy, {"convolution": 0.4718592, "product": 2.68435456})
    told = [str(finding) for finding in findings(HOME, SOUND, times)]
    fast = "20 GFLOP/s in a convolution, 100 GFLOP/s in a product: 20 and 1 times as fast as"
    assert f"ok   kernels     {fast} numpy's" in told
    told = [str(finding) for finding in findings(HOME, replace(SOUND, busy_cores=1.5), times)]
    busy = ", while other processes were busy: measure again without"
    assert f"ok   kernels     {fast} numpy's{busy}" in told


def test_kernels_are_measured_without_a_compiler():
    times = measured_kernels(Settings(), has_compiler=False)
    assert times.numpy.keys() == FLOPS.keys()
    assert min(times.numpy.values()) > 0
    assert times.native == {}


def test_a_compiler_that_does_not_run_is_named():
    ((text, _),) = warnings({**HOME, "CC": "icc"}, compiler=None)
    assert text.startswith("CC=icc does not run")


def test_a_missing_library_of_products_is_a_warning_only_where_there_is_one():
    ((text, mend),) = warnings(onednn=None)
    assert "go through OpenBLAS" in text
    assert mend == "python -m pip install onednn-cpu-gomp cffi"
    assert warnings(onednn=None, system="Linux aarch64") == []


def test_a_compiler_that_builds_nothing_is_quoted_with_what_it_costs():
    said = "the C compiler /usr/bin/cc ended with status 1: error: no assembler"
    ((text, mend),) = warnings(compiler_error=said)
    assert text.startswith(f"{said}: numpy's kernels run, and a step of a small GPT takes about")
    assert mend == "mend it, or name another C compiler with CC"
