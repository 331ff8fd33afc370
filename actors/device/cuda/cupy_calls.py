"""Calls of CUDA through cupy's low-level modules: on integers, for one GPU, from any thread.

The only module that imports cupy, and only when a GPU is opened. cupy raises CUDA's codes, but for
`eventQuery`, which returns them.

Source: CUDA Runtime API and Driver API, versions 13; CuPy 14 (cupy_backends.cuda.api).
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

from actors.device.cuda.driver import OLDEST_CUDA, CudaError
from actors.device.cuda.faults import absent, forked
from compiler.errors import DeviceError

INSTALL = "python -m pip install 'actorflow[cuda]'"

_NOT_INITIALIZED = 3

_current = threading.local()
"""The device of each thread, as CUDA itself keeps it: not a call of CUDA's for every call."""


class CupyCalls:
    """The runtime and the driver, for one GPU. Errors are CudaError.

    Args:
        index: Which of those that CUDA shows to this process.
    """

    def __init__(self, index: int) -> None:
        """Find it. Raises DeviceError, which says what is missing."""
        self._cuda, self._runtime = modules()
        self._errors = (self._cuda.CUDADriverError, self._runtime.CUDARuntimeError)
        self._index = index
        self._check(f"cuda:{index}")

    def _check(self, device: str) -> None:
        runtime = self._runtime
        version = runtime.driverGetVersion()
        if version == 0:
            raise DeviceError(f"{device} needs an NVIDIA driver, and none is here")
        serves = (version // 1000, version % 1000 // 10)
        if serves < OLDEST_CUDA:
            raise DeviceError(
                f"{device} needs CUDA 13.0, and the NVIDIA driver here serves CUDA"
                f" {serves[0]}.{serves[1]} at most: install a driver of version 580 or later"
            )
        try:
            count = runtime.getDeviceCount()
            if self._index >= count:
                raise absent(device, count)
            runtime.setDevice(self._index)
        except self._errors as error:
            if error.status == _NOT_INITIALIZED:
                raise forked(device) from error
            raise DeviceError(f"{device} cannot be opened: {error}") from error

    def ask(self, name: str, *given: Any) -> Any:
        """Make a call of the runtime."""
        self._enter()
        return self._call(self._runtime, name, given)

    def ask_driver(self, name: str, *given: Any) -> Any:
        """Make a call of the driver."""
        self._enter()
        return self._call(self._cuda, name, given)

    def put(self, name: str, *given: Any) -> None:
        """Make a call of the runtime that steps are made of: on the dispatcher's own thread."""
        self.here()
        self._call(self._runtime, name, given)

    def put_kernel(self, *given: int) -> None:
        """Launch a kernel, likewise."""
        self.here()
        self._call(self._cuda, "launchKernel", given)

    def _call(self, module: Any, name: str, given: tuple[Any, ...]) -> Any:
        try:
            return getattr(module, name)(*given)
        except self._errors as error:
            raise CudaError(str(error), code=error.status, call=name) from error

    def _enter(self) -> None:
        """Make this GPU that of the thread, where code of others may have set another one."""
        self._call(self._runtime, "setDevice", (self._index,))
        _current.index = self._index

    def here(self) -> None:
        """Make this GPU that of the thread, unless it is, as far as we know."""
        if getattr(_current, "index", None) != self._index:
            self._enter()


def modules() -> tuple[Any, Any]:
    """Return cupy's modules of the driver and the runtime. Raises DeviceError."""
    try:
        driver = importlib.import_module("cupy_backends.cuda.api.driver")
        runtime = importlib.import_module("cupy_backends.cuda.api.runtime")
    except ImportError as error:
        raise DeviceError(
            f"a CUDA device needs the package cupy, which cannot be imported: {INSTALL} ({error})"
        ) from error
    return driver, runtime
