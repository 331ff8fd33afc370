"""What is here: packages, libraries, the GPU."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil

from actors.device.cuda import cudnn as cudnn_here
from actors.device.cuda.cublaslt import LIBRARY, CublasLt
from actors.device.cuda.cudnn import Cudnn
from actors.device.cuda.nvml import listed_gpus
from actors.kernels.cuda import nvrtc
from actors.kernels.cuda.kernel import gpu_named
from actors.kernels.cuda.nvrtc import find_library
from compiler.contract.errors import DeviceError
from gpu.opened import GPU, open_driver
from gpu.section import Findings, Place, Skipped

_PACKAGES = (
    "numpy", "msgpack", "pyzmq", "cffi", "cupy-cuda13x", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime",
    "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-cudnn-jit-cu13", "nvidia-cudnn-frontend", "torch",
    "triton", "jax", "matplotlib", "Pillow",
)  # fmt: skip


def run(found: Findings, place: Place) -> None:
    found.fact("python", f"{platform.python_version()} on {platform.platform()}")
    found.fact("cores", os.cpu_count())
    found.fact("C compiler", shutil.which("cc") or shutil.which("gcc") or "none")
    for name in _PACKAGES:
        found.fact(name, _version(name))
    for name, ask in (("NVRTC", nvrtc.version), ("cuBLASLt", _cublaslt), ("cuDNN", _cudnn)):
        try:
            found.fact(name, ask())
        except Exception as error:  # whatever a package that is half here may raise
            found.fact(name, f"not here: {type(error).__name__}: {error}")
    here = listed_gpus(os.environ)
    if not place.is_emulated:
        found.fact("driver", here.problem or f"{here.driver}, CUDA {here.cuda}")
        for gpu in here.gpus:
            found.fact(gpu.name, f"{gpu.capability}, {gpu.memory_bytes:,} bytes")
    try:
        driver = open_driver(place)
    except DeviceError as error:
        if not here.problem:
            raise
        raise Skipped(f"of a device: {here.problem}; {error}") from error
    card, model = driver.seen(), gpu_named(GPU)
    found.check(
        "its kernels are those that plans are made for",
        card.capability == model.capability,
        card.capability,
        model.capability,
    )
    # On a GPU without a description all is proven as well, and expected numbers mean less.
    found.fact("GPU", f"{card.name}, {card.num_sms} multiprocessors; plans are for {model.says}")
    found.fact("memory", f"{card.memory_bytes:,} bytes, {driver.free_bytes():,} free")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not here"


def _cublaslt() -> int:
    return CublasLt(find_library(LIBRARY)).version


def _cudnn() -> str:
    Cudnn()  # which finds what the package alone would not
    import cudnn

    why_not = cudnn_here.why_not()
    return f"{cudnn.backend_version()}{f', not used: {why_not}' if why_not else ''}"
