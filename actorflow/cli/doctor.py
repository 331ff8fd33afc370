"""`actorflow doctor`: is this machine, and this shell, fit to train on?

`actorflow.environment.host` looks; `findings` judges what was seen. The judgement is a pure
function, so that every machine can be tested on one. A finding that wants something done says what.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

from actorflow.environment.host import CUDA_PACKAGES, Host, described, dotted, examine
from actorflow.environment.kernel_times import FLOPS, KernelTimes, measured_kernels
from actorflow.environment.settings import ENVIRONMENT, Settings, SettingsError
from actors.device.cuda.driver import OLDEST_CUDA
from actors.device.cuda.nvml import NvmlDevice
from actors.kernels.cuda.cudnn_library import OLDEST
from actors.kernels.library.openblas import HOLDING_VARIABLES
from compiler.contract.errors import CompileError

_BUSY_CORES = 0.25  # less than this is the background of any desktop
_LOW_MEMORY_BYTES = 1 << 30
_COST_WITHOUT_COMPILER = (
    "a step of a small GPT takes about 1.3 times as long, one of tiny ops 7, of convolutions 20"
)
_COST_WITHOUT_ONEDNN = "reach about 3/4 of its speed; those of bfloat16 are computed in float32"
_USES = {"cuda": "a GPU", "cudnn": "cuDNN on a GPU", "nccl": "ranks on GPUs"}
"""What needs the packages of an extra."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact. With a `mend`, which says what to do, it is a warning.

    `is_passing`: it is a note instead, for it speaks of this minute and not of the machine.
    """

    topic: str
    text: str
    mend: str = ""
    is_passing: bool = False

    @property
    def is_warning(self) -> bool:
        """Whether something about the machine or the shell wants to be mended."""
        return bool(self.mend) and not self.is_passing

    def __str__(self) -> str:
        word = "note" if self.is_passing else "warn" if self.mend else "ok"
        head = f"{word:<5}{self.topic:<11} {self.text}"
        return f"{head}\n{'':<17}-> {self.mend}" if self.mend else head


def run(options: argparse.Namespace) -> int:
    """Print the report. Return 0 if all is well, 1 if a line says what to mend."""
    host, times = examine(os.environ), None
    with suppress(SettingsError):  # a finding names it
        settings, has_compiler = Settings.from_env(os.environ), _has_compiler(host)
        times = measured_kernels(settings, has_compiler=has_compiler)
    report = findings(os.environ, host, times)
    if options.json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in report]) + "\n")
    else:
        for finding in report:
            sys.stdout.write(f"{finding}\n")
    return 1 if any(finding.is_warning for finding in report) else 0


def findings(
    environ: Mapping[str, str], host: Host, times: KernelTimes | None = None
) -> list[Finding]:
    """Judge what was seen, in the order in which one would mend it."""
    return [
        *_python_findings(host),
        *_blas_findings(environ, host),
        *_native_findings(environ, host),
        *([] if times is None else [Finding("kernels", _measured(times) + _while_busy(host))]),
        *_core_findings(host),
        _ranks_finding(host),
        *_mpi_findings(host),
        *_machine_findings(host),
        *_cuda_findings(host),
        *_settings_findings(environ, host),
    ]


def _python_findings(host: Host) -> Iterator[Finding]:
    yield Finding("python", f"{'.'.join(map(str, host.python))} on {host.system}")
    for name, version in host.packages.items():
        if version is None:
            yield Finding(name, "is not installed", f"python -m pip install {name}")
        else:
            yield Finding(name, version)


def _blas_findings(environ: Mapping[str, str], host: Host) -> Iterator[Finding]:
    blas, free = host.blas, host.free_blas
    if blas is None or blas.core_name is None:
        name = "not recognised" if blas is None else f"{blas.library}, not OpenBLAS"
        yield Finding("blas", f"{name}: its kernels are unknown")
        return
    num_threads = _threads(blas.num_threads)
    yield Finding("blas", f"{blas.library}: {blas.core_name} kernels, {num_threads}")
    core_type = environ.get("OPENBLAS_CORETYPE")
    if core_type and (free is None or free.core_name != blas.core_name):
        better = "what this processor has" if free is None else f"the {free.core_name} kernels"
        text = (
            f"OPENBLAS_CORETYPE={core_type} holds numpy to the {blas.core_name} kernels;"
            f" without it numpy takes {better}"
        )
        yield Finding("blas", text, "unset OPENBLAS_CORETYPE")
    if environ.get("OPENBLAS_L2_SIZE"):
        text = (
            f"OPENBLAS_L2_SIZE={environ['OPENBLAS_L2_SIZE']} overrides the cache size that OpenBLAS"
            " reads from the processor, and sets the blocks of a matrix product"
        )
        yield Finding("blas", text, "unset OPENBLAS_L2_SIZE")
    names = [name for name in HOLDING_VARIABLES if name.endswith("THREADS") and environ.get(name)]
    if not names or free is None or free.num_threads is None or blas.num_threads is None:
        return
    if blas.num_threads != free.num_threads:
        settings = ", ".join(f"{name}={environ[name]}" for name in names)
        change = "holds" if blas.num_threads < free.num_threads else "drives"
        yield Finding(
            "blas",
            f"{settings} {change} numpy to {num_threads}; without it numpy takes"
            f" {_threads(free.num_threads)}",
            f"unset {' '.join(names)}, unless several processes share the machine on purpose",
        )


def _native_findings(environ: Mapping[str, str], host: Host) -> Iterator[Finding]:
    """What generated kernels and the library of products need, and what it costs to lack them."""
    if host.compiler is None:
        named = f"CC={environ['CC']} does not run" if environ.get("CC") else "no cc, gcc or clang"
        text = f"{named}: numpy's kernels run, and {_COST_WITHOUT_COMPILER}"
        mend = "install a C compiler (Debian, Ubuntu: apt install gcc), or name it with CC"
        yield Finding("compiler", text, mend)
    elif host.compiler_error:
        text = f"{host.compiler_error}: numpy's kernels run, and {_COST_WITHOUT_COMPILER}"
        yield Finding("compiler", text, "mend it, or name another C compiler with CC")
    else:
        yield Finding("compiler", host.compiler)
    if host.onednn is not None:
        yield Finding("onednn", host.onednn)
    elif host.system == "Linux x86_64":
        text = f"is not installed: matrix products go through OpenBLAS, and {_COST_WITHOUT_ONEDNN}"
        yield Finding("onednn", text, "python -m pip install onednn-cpu-gomp cffi")
    else:
        yield Finding("onednn", "there is none for this system: products use OpenBLAS")


def _measured(times: KernelTimes) -> str:
    """Return how fast kernels are here, and how much slower numpy's are than native ones."""
    used = times.native or times.numpy
    texts = [f"{FLOPS[name] / ms / 1e6:.3g} GFLOP/s in a {name}" for name, ms in used.items()]
    if times.native:
        gains = [f"{times.numpy[name] / ms:.2g}" for name, ms in used.items()]
        return f"{', '.join(texts)}: {' and '.join(gains)} times as fast as numpy's"
    return f"{', '.join(texts)}, by numpy's kernels"


def _while_busy(host: Host) -> str:
    is_busy = host.busy_cores is not None and host.busy_cores > _BUSY_CORES
    return ", while other processes were busy: measure again without" * is_busy


def _has_compiler(host: Host) -> bool:
    return host.compiler is not None and not host.compiler_error


def _core_findings(host: Host) -> Iterator[Finding]:
    usable = float(host.num_cores)
    if host.quota_cores is not None and host.quota_cores < host.num_cores:
        usable = host.quota_cores
        text = f"{host.num_cores} are visible, and the container may use {usable:.1f}"
        mend = f"set ACTORFLOW_THREADS={max(1, int(usable))}, or give the container more"
        yield Finding("cores", text, mend)
    else:
        yield Finding("cores", f"{host.num_cores} available")
    if host.busy_cores is not None and host.busy_cores > _BUSY_CORES:
        yield Finding(
            "load",
            f"other processes use {host.busy_cores:.1f} of {usable:.0f} cores; kernels that"
            " wait for their threads suffer most",
            "stop them (top shows which), or leave them cores with ACTORFLOW_THREADS",
            is_passing=True,  # who shares a machine can mend nothing, and a script asks us
        )
    elif host.busy_cores is not None:
        yield Finding("load", f"other processes use {host.busy_cores:.1f} cores")


def _ranks_finding(host: Host) -> Finding:
    """Whether `actorflow launch` can run several ranks; what is missing is a finding of its own."""
    has = {
        "memory that processes share (memfd)": host.shares_memory,
        "a C compiler": _has_compiler(host),
        "the loopback device (127.0.0.1), which is down or closed": host.reaches_loopback,
    }
    if missing := [name for name, is_there in has.items() if not is_there]:
        return Finding("ranks", f"several cannot run here: they need {' and '.join(missing)}")
    usable = max(1, int(min(host.num_cores, host.quota_cores or host.num_cores)))
    most = f"up to {usable} have a core each" if usable > 1 else "they take turns on one core"
    return Finding("ranks", f"several can run here, by actorflow launch -n P: {most}")


def _mpi_findings(host: Host) -> Iterator[Finding]:
    """What ranks on several hosts exchange tensors by."""
    for name, version in host.mpi_packages.items():
        missing = "is not installed: ranks on several hosts would need it (extra [mpi])"
        yield Finding(name, missing if version is None else version)


def _machine_findings(host: Host) -> Iterator[Finding]:
    if host.memory_bytes is None or host.available_bytes is None:
        yield Finding("memory", "not reported by this system")
    else:
        total, available = host.memory_bytes / 2**30, host.available_bytes / 2**30
        is_low = host.available_bytes < _LOW_MEMORY_BYTES
        mend = "end other programs, or give jobs a memory_budget=" if is_low else ""
        yield Finding("ram", f"{available:.1f} GiB available of {total:.1f} GiB", mend)


def _cuda_findings(host: Host) -> Iterator[Finding]:
    """What jobs on CUDA need here; without a GPU, what can be done all the same."""
    cuda, packages = host.cuda, host.cuda_packages
    if cuda.problem:
        can = "plans for one are made with --gpu, and can run emulated, slowly"
        yield Finding("gpu", f"{cuda.problem}; {can}")
    elif cuda.cuda < OLDEST_CUDA:
        text = f"the driver {cuda.driver} serves CUDA {dotted(cuda.cuda)}, jobs on cuda need 13.0"
        yield Finding("gpu", text, "install an NVIDIA driver of version 580 or later")
    else:
        yield Finding("gpu", f"driver {cuda.driver}, which serves CUDA {dotted(cuda.cuda)}")
    for number, gpu in enumerate(cuda.gpus):
        text = f"{gpu.name}, {gpu.memory_bytes / 2**30:.1f} GiB, {dotted(gpu.capability)}"
        yield Finding(f"cuda:{number}", text, _how_to_plan(gpu))
    for name, version in packages.items():
        if version is not None:
            yield Finding(name, version)
        elif cuda.gpus and CUDA_PACKAGES[name] == "cuda":
            yield Finding(name, "is not installed", "python -m pip install 'actorflow[cuda]'")
        else:
            extra = CUDA_PACKAGES[name]
            text = f"is not installed: {_USES[extra]} would need it (extra [{extra}])"
            yield Finding(name, text)
    yield _cudnn_finding(host)


def _cudnn_finding(host: Host) -> Finding:
    """Return which cuDNN is used."""
    found = host.cudnn
    if found is None:
        return Finding("cudnn", f"is not installed: {_USES['cudnn']} would need it (extra [cudnn])")
    is_old = found.library.version < OLDEST
    return Finding("cudnn", f"{found.about}{f'; {dotted(OLDEST)} is the oldest used' * is_old}")


def _how_to_plan(gpu: NvmlDevice) -> str:
    """Return what to do about a GPU that there is no description of; "" for any other."""
    try:
        described(gpu)
    except CompileError as error:
        return str(error)
    return ""


def _settings_findings(environ: Mapping[str, str], host: Host) -> Iterator[Finding]:
    try:
        settings = Settings.from_env(environ)
    except SettingsError as error:
        yield Finding("settings", str(error), "correct the variable, or unset it")
        return
    if settings.cache is None:
        yield Finding("cache", "off: every start compiles again")
    else:
        mend = "" if host.cache_is_writable else "set ACTORFLOW_CACHE to a folder of yours, or off"
        state = "writable" if host.cache_is_writable else "cannot be written"
        yield Finding("cache", f"{settings.cache}, {state}", mend)
    for variable in ENVIRONMENT:
        value = environ.get(variable.name)
        if value:
            yield Finding("setting", f"{variable.name}={value}: {variable.meaning}")
    for text in settings.warnings:
        yield Finding("settings", text, "correct the variable, or unset it")


def _threads(number: int | None) -> str:
    if number is None:
        return "an unknown number of threads"
    return f"{number} thread{'' if number == 1 else 's'}"
