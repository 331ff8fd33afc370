"""What can be seen of the machine and its Python, without changing either.

Nothing is imported to see whether it is there, no folder is made to see whether it could be, and
what this system does not tell is None.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from actorflow.settings import Settings, SettingsError
from actors.device.cuda.nvml import Listing, listed_gpus
from actors.kernels.library.openblas import (
    HOLDING_VARIABLES,
    BlasInfo,
    blas_without_variables,
    loaded_blas,
)
from actors.kernels.native.toolchain import CompilerError, Toolchain, find_toolchain

_REQUIRED_PACKAGES = ("numpy", "msgpack", "pyzmq", "safetensors", "xxhash")
CUDA_PACKAGES = {
    "cupy-cuda13x": "cuda",
    "nvidia-cuda-nvrtc": "cuda",
    "nvidia-cuda-runtime": "cuda",
    "nvidia-cublas": "cuda",
    "nvidia-cudnn-frontend": "cudnn",
    "nvidia-cudnn-cu13": "cudnn",
    "cuda-bindings": "cudnn",
}
"""What jobs on CUDA may use, with the extra that installs it."""

_BUSY_WINDOW_S = 0.2


@dataclass(frozen=True, slots=True)
class Host:
    """What was seen of a machine. None stands for what this system does not tell.

    `packages` is distribution -> version or None; `cuda_packages` the same for CUDA_PACKAGES.
    `compiler` is what the C compiler calls itself, and `compiler_error` why it builds nothing.
    `onednn` is the version of the library of products.
    `busy_cores` is what other processes use. `shares_memory` is whether ranks can be started and
    share memory: by pidfd and memfd, which Linux has.
    """

    python: tuple[int, int, int]
    system: str
    packages: Mapping[str, str | None]
    cuda: Listing
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


def examine(environ: Mapping[str, str], wait: Callable[[float], None] = time.sleep) -> Host:
    """Look at this machine, in about half a second.

    A child process is started only if a variable that OpenBLAS reads is set. `wait` passes the time
    between two readings of the load.
    """
    held = any(environ.get(name) for name in HOLDING_VARIABLES)
    total, available = _memory_bytes()
    toolchain = find_toolchain(environ, None)
    return Host(
        python=sys.version_info[:3],
        system=f"{platform.system()} {platform.machine()}",
        packages={name: _version(name) for name in _REQUIRED_PACKAGES},
        cuda=listed_gpus(environ),
        cuda_packages={name: _version(name) for name in CUDA_PACKAGES},
        blas=loaded_blas(),
        free_blas=blas_without_variables(environ) if held else None,
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
    )


def is_writable(folder: Path) -> bool:
    """Return whether files can be made in `folder`, or it can be made; creates nothing."""
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
    fields = [int(field) for field in text.split("\n", 1)[0].split()[1:]]
    return sum(fields[i] for i in (0, 1, 2, 5, 6, 7) if i < len(fields))


def _busy_cores(wait: Callable[[float], None]) -> float | None:
    stat = Path("/proc/stat")
    try:
        begun, before = time.monotonic(), stat.read_text(encoding="ascii")
        wait(_BUSY_WINDOW_S)
        after, ended = stat.read_text(encoding="ascii"), time.monotonic()
        num_ticks = (ended - begun) * os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
    return busy_cores(before, after, max(num_ticks, 1.0))


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
    return cores if quota is None else max(1, min(cores, round(quota)))


def _num_cores() -> int:
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
