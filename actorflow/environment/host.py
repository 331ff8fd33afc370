"""The machine and its Python: what is installed, which GPU a plan is made for, how many threads.

`examine` looks without changing anything: nothing is imported to see whether it is there, no folder
is made to see whether it could be, and what this system does not tell is None. A plan needs the
description of a GPU (`actors.kernels.cuda.kernel`) and no GPU: `gpu_for` takes the one that is
named, else the one that is here.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from actorflow.environment.settings import Settings, SettingsError
from actors.device.cuda.nvml import NvmlDevice, NvmlDevices, listed_gpus
from actors.kernels.library import runtime
from actors.kernels.library.openblas import (
    HOLDING_VARIABLES,
    BlasInfo,
    blas_without_variables,
    loaded_blas,
)
from actors.kernels.library.toolchain import CompilerError, Toolchain, find_toolchain
from actors.kernels.library.toolchain import processor as processor_and_flags
from compiler.contract.errors import CompileError
from compiler.contract.placement import Device, DeviceKind
from compiler.contract.plan import Plan

if TYPE_CHECKING:  # a job of the host loads no kernels of GPUs
    from actors.device.cuda.cudnn import InstalledCudnn
    from actors.kernels.cuda.cudnn_library import CudnnLibrary
    from actors.kernels.cuda.kernel import Gpu

_REQUIRED_PACKAGES = ("numpy", "msgpack", "pyzmq", "safetensors", "xxhash")
CUDA_PACKAGES = {
    "cupy-cuda13x": "cuda",
    "nvidia-cuda-nvrtc": "cuda",
    "nvidia-cuda-runtime": "cuda",
    "nvidia-cublas": "cuda",
    "nvidia-cudnn-frontend": "cudnn",
    "cuda-bindings": "cudnn",
    "nvidia-nccl-cu13": "nccl",
}
"""What jobs on CUDA may use, with the extra that installs it."""

MPI_PACKAGES = ("mpi4py", "mpich")
"""What ranks on several hosts need (extra [mpi])."""

_BUSY_WINDOW_S = 0.2
_LOOPBACK_S = 1.0


@dataclass(frozen=True, slots=True)
class Host:
    """What was seen of a machine. None stands for what this system does not tell.

    `packages` is distribution -> version or None; `cuda_packages` the same for CUDA_PACKAGES, and
    `mpi_packages` for MPI_PACKAGES.
    `compiler` is what the C compiler calls itself, and `compiler_error` why it builds nothing.
    `onednn` is the version of the library of products; `cudnn` is the one that is found first.
    `busy_cores` is what other processes use. `shares_memory` is whether ranks can be started and
    share memory: by pidfd and memfd, which Linux has. `reaches_loopback` is whether they can talk.
    """

    python: tuple[int, int, int]
    system: str
    packages: Mapping[str, str | None]
    cuda: NvmlDevices
    cuda_packages: Mapping[str, str | None]
    blas: BlasInfo | None
    free_blas: BlasInfo | None
    compiler: str | None
    onednn: str | None
    num_cores: int
    quota_cores: float | None
    memory_bytes: int | None
    available_bytes: int | None
    busy_cores: float | None
    cache_is_writable: bool
    compiler_error: str = ""
    shares_memory: bool = True
    reaches_loopback: bool = True
    cudnn: InstalledCudnn | None = None
    mpi_packages: Mapping[str, str | None] = field(default_factory=dict)


def examine(environ: Mapping[str, str], wait: Callable[[float], None] = time.sleep) -> Host:
    """Look at this machine, in about half a second.

    A child process is started only if a variable that OpenBLAS reads is set. `wait` passes the time
    between two readings of the load.
    """
    from actors.device.cuda.cudnn import installed  # late: only those who ask load it

    is_held = any(environ.get(name) for name in HOLDING_VARIABLES)
    total, available = _memory_bytes()
    toolchain = find_toolchain(environ, None)
    return Host(
        python=sys.version_info[:3],
        system=f"{platform.system()} {platform.machine()}",
        packages={name: _version(name) for name in _REQUIRED_PACKAGES},
        cuda=listed_gpus(environ),
        cuda_packages={name: _version(name) for name in CUDA_PACKAGES},
        blas=loaded_blas(),
        free_blas=blas_without_variables(environ) if is_held else None,
        compiler=None if toolchain is None else _described(toolchain),
        compiler_error="" if toolchain is None else _refusal(toolchain),
        onednn=_version("onednn-cpu-gomp"),
        num_cores=_num_cores(),
        quota_cores=_quota_cores(),
        memory_bytes=total,
        available_bytes=available,
        busy_cores=_busy_cores(wait),
        cache_is_writable=_cache_is_writable(environ),
        shares_memory=hasattr(os, "memfd_create") and hasattr(os, "pidfd_open"),
        reaches_loopback=_reaches_loopback(),
        cudnn=installed(),
        mpi_packages={name: _version(name) for name in MPI_PACKAGES},
    )


def _reaches_loopback() -> bool:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), _LOOPBACK_S).close()
    except OSError:
        return False
    return True


def is_writable(folder: Path) -> bool:
    """Return whether files can be made in `folder`, or it can be made; creates nothing."""
    # The nearest folder that exists decides whether the missing ones can be made.
    for place in (folder, *folder.absolute().parents):
        if place.exists():
            return place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    return False


def busy_cores(before: str, after: str, num_ticks: float) -> float:
    """Return how many cores were busy between two readings of /proc/stat.

    Args:
        before: the first text of the file.
        after: the second.
        num_ticks: clock ticks that one core has between them.
    """
    return max(0.0, (_busy_ticks(after) - _busy_ticks(before)) / num_ticks)


def _busy_ticks(text: str) -> int:
    """Return the ticks in user, nice, system, irq, softirq and steal of the line of all cores.

    Guest time is within user, idle and iowait are not work: proc(5).
    """
    # The first line sums all cores; its fields are clock ticks since boot.
    fields = [int(field) for field in text.split("\n", 1)[0].split()[1:]]
    return sum(fields[i] for i in (0, 1, 2, 5, 6, 7) if i < len(fields))


def _busy_cores(wait: Callable[[float], None]) -> float | None:
    stat = Path("/proc/stat")
    try:
        begin_s, before = time.monotonic(), stat.read_text(encoding="ascii")
        wait(_BUSY_WINDOW_S)
        after, end_s = stat.read_text(encoding="ascii"), time.monotonic()
        num_ticks = (end_s - begin_s) * os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
    return busy_cores(before, after, max(num_ticks, 1.0))


_OF_KERNELS = ("numpy", "onednn-cpu-gomp")
_INSTRUCTIONS = re.compile("(amx|asimd|avx|bmi|f16c|fma|fp16|bf16|i8mm|sse|ssse|sve)")
"""How the flags of instructions begin that kernels are chosen by, of all that a processor has: the
others, which a kernel or a hypervisor may hide, change no bit."""


@dataclass(frozen=True, slots=True)
class KernelHost:
    """What decides the bits of a host's kernels, in words.

    `processor` is its name, `instructions` are those that kernels use; `compiler` is what the C
    compiler calls itself, `libraries` those of kernels with their versions; "" for none.
    """

    processor: str
    instructions: str
    compiler: str
    libraries: str


def kernel_host(environ: Mapping[str, str]) -> KernelHost:
    """Return what decides the bits of kernels here; it starts the C compiler once."""
    toolchain = find_toolchain(environ, None)
    flags = {word for word in processor_and_flags().split() if _INSTRUCTIONS.match(word)}
    libraries = [f"{name} {_version(name)}" for name in _OF_KERNELS if _version(name)]
    compiler = "" if toolchain is None else toolchain.version.partition("\n")[0]
    return KernelHost(processor(), " ".join(sorted(flags)), compiler, ", ".join(libraries))


def processor() -> str:
    """Return what the processor calls itself, or what Python knows of it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or "an unknown processor"


def usable_cores() -> int:
    """Return how many cores this process may keep busy: its affinity, and its group's quota."""
    quota = _quota_cores()
    cores = _num_cores()
    # A container may be shown all cores and given the time of a few; threads beyond that only wait.
    return cores if quota is None else max(1, min(cores, round(quota)))


def _num_cores() -> int:
    # os.cpu_count does not know the affinity; macOS has none.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quota_cores() -> float | None:
    """Return the cores that a control group allows (cgroup v2, cpu.max), or None."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _memory_bytes() -> tuple[int | None, int | None]:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, ValueError, IndexError, KeyError):
        return None, None


def _described(toolchain: Toolchain) -> str:
    version = (toolchain.version.splitlines() or ["no version"])[0]
    return f"{shlex.join(toolchain.command)}: {version}"


def _refusal(toolchain: Toolchain) -> str:
    """Return why a compiler does not build a function of one line; "" where it does."""
    try:
        toolchain.library("int af_probe(void) { return 0; }\n")
    except CompilerError as error:
        return str(error)
    return ""


def _version(distribution: str) -> str | None:
    from importlib import metadata  # 10 ms that a run need not pay

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cache_is_writable(environ: Mapping[str, str]) -> bool:
    """Return False for a cache folder that cannot be; a bad setting is reported elsewhere."""
    try:
        cache = Settings.from_env(environ).cache
    except SettingsError:
        return True
    return cache is None or is_writable(cache)


EMULATED = "h200"
"""What the host acts as under ACTORFLOW_CUDA=emulated, where nothing else is named."""

_HOW = '@af.job(device="cuda", gpu="{0}"), --gpu {0} or ACTORFLOW_GPU={0}'


def is_cuda(device: Device) -> bool:
    """Whether a device is a GPU."""
    return device.kind is DeviceKind.CUDA


def gpu_called(name: str, said: str = "") -> Gpu:
    """Return the description of a GPU by the user's name for it.

    `said` is what it was given by, such as "--gpu", where nobody else says that. Raises
    CompileError, which names the nearest and those that there are.
    """
    from actors.kernels.cuda.kernel import gpu_named, known_gpus

    gpus = known_gpus()
    if name.lower() in gpus:
        return gpu_named(name.lower())
    near = get_close_matches(name.lower(), gpus, 1)
    hint = f"did you mean {near[0]!r}? There" if near else "there"
    where = f"{said}: " if said else ""
    raise CompileError(
        f"{where}no GPU is called {name!r}; {hint} are descriptions of"
        f" {', '.join(gpus)} (actors/kernels/cuda/*.json)"
    )


def check_gpu(named: object, devices: Sequence[Device], option: str = "") -> None:
    """Check what a job says of its GPU; `devices` may be left open, and then there are none.

    `option` is that of the command line where the name comes from one. Raises CompileError.
    """
    if not isinstance(named, str):
        raise CompileError(f'gpu must be a name such as "h200", got {named!r}')
    gpu_called(named, option)
    if devices and not any([is_cuda(device) for device in devices]):
        option_text = f"{option} {named}" if option else f"gpu={named!r}"
        raise CompileError(
            f"{option_text} is given, and the job runs on {', '.join(map(str, devices))}, which"
            ' is no GPU; give device="cuda", --device cuda or ACTORFLOW_DEVICE=cuda, or leave'
            " gpu out"
        )


def gpu_for(devices: Sequence[Device], named: str | None, settings: Settings) -> str:
    """Return the name of the GPU that a job's CUDA devices are planned as; "" without any.

    It is the one `named` by the job, else that of ACTORFLOW_GPU, else the one that is here. Raises
    CompileError, which says how to name one, where that is not known.
    """
    if named is not None:
        check_gpu(named, devices)
    gpus = [device for device in devices if is_cuda(device)]
    if not gpus:
        return ""
    acted = [device for device in devices if device.kind is DeviceKind.SIM]
    if acted:
        raise CompileError(
            f"the job runs on {gpus[0]} and on {acted[0]}, which is simulated, and a GPU cannot"
            " exchange data with a simulated device; name GPUs and the host, or simulated"
            " devices and the host"
        )
    if named is not None:
        return gpu_called(named).name
    if settings.gpu:
        return gpu_called(settings.gpu, "ACTORFLOW_GPU").name
    if settings.emulated_gpus:
        return EMULATED
    return _gpu_here(gpus[0]).name


def _gpu_here(device: Device) -> Gpu:
    from actors.kernels.cuda.kernel import known_gpus

    here = listed_gpus(os.environ)
    if here.problem or device.index >= len(here.gpus):
        problem = here.problem or f"there are {len(here.gpus)} GPUs, counted from 0"
        raise CompileError(
            f"the model of GPU {device} must be known to compile for it, and {problem}. Name it:"
            f" {_HOW.format(EMULATED)}; there are descriptions of {', '.join(known_gpus())}."
            " Plans can be made, printed and simulated without a GPU, and"
            " ACTORFLOW_CUDA=emulated runs them on the host, slowly"
        )
    return described(here.gpus[device.index])


def described(seen: NvmlDevice) -> Gpu:
    """Return the description of a GPU that is here. Raises CompileError where there is none."""
    from actors.kernels.cuda.kernel import gpu_named, known_gpus

    gpus = [gpu_named(name) for name in known_gpus()]
    # By the name that NVML says: GPUs of one capability differ in memory and rates.
    for gpu in gpus:
        if gpu.says == seen.name:
            return gpu
    alike = [gpu.name for gpu in gpus if gpu.capability == seen.capability]
    mend = (
        f"plan for one with the same instructions: {_HOW.format(alike[0])}"
        if alike
        else "add one (actors/kernels/cuda/*.json)"
    )
    raise CompileError(
        f"the GPU here is {seen.name!r} (compute capability {dotted(seen.capability)}), which has"
        f" no description; there are those of {', '.join([gpu.says for gpu in gpus])}; {mend}"
    )


def cudnn_for(settings: Settings) -> CudnnLibrary | None:
    """Return the cuDNN of plans for a GPU: as the settings say, else where it is installed.

    Where the settings ask for it and it cannot run here, the newest and whole one.
    """
    from actors.device.cuda import cudnn
    from actors.kernels.cuda.cudnn_library import CudnnLibrary

    if settings.cudnn is False:
        return None
    here = cudnn.library_here()
    return CudnnLibrary() if here is None and settings.cudnn else here


def cudnn_of(plan: Plan) -> CudnnLibrary | None:
    """Return the cuDNN that a plan was compiled for; None for a plan without it."""
    if not gpu_of(plan):
        return None
    from actors.kernels.cuda.cudnn_library import library_of

    return library_of(plan.target)


def gpu_of(plan: Plan) -> str:
    """Return the name of the GPU that a plan was compiled for; "" for one without CUDA devices."""
    return str(plan.option("gpu", ""))


def dotted(version: tuple[int, int]) -> str:
    """Return a version, or a compute capability, as it is written: 9.0."""
    return f"{version[0]}.{version[1]}"


def num_threads() -> int:
    """Return the threads that kernels may use here; the choice of streams depends on them."""
    if runtime.is_enabled():
        return runtime.num_threads()
    return Settings.from_env(os.environ).threads or usable_cores()
