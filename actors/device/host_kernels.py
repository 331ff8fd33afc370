"""Kernels that work on memory of the host: numpy's and C's, bound to arrays."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from actors.protocol import Array, Arrays, Launch
from compiler.errors import ActorflowError, DeviceError
from compiler.plan import AttrValue

if TYPE_CHECKING:
    from actors.kernels.kernel import Kernel

NO_KERNELS: Mapping[str, Kernel] = MappingProxyType({})


class HostKernels:
    """What a device has whose kernels bind numpy arrays: see `DeviceStore`.

    Args:
        kernels: By the name that launches use.
    """

    def __init__(self, kernels: Mapping[str, Kernel]) -> None:
        self._kernels = kernels

    def has_kernel(self, name: str) -> bool:
        """Whether a launch of this kernel can be bound."""
        return name in self._kernels

    def bind(
        self,
        kernel: str,
        attrs: Mapping[str, AttrValue],
        inputs: Arrays,
        outputs: Arrays,
        workspace: Array | None,
    ) -> Launch:
        """Return the launch of a kernel; see `DeviceStore.bind`."""
        try:
            made = self._kernels[kernel].bind(attrs, inputs, outputs, workspace)
        except ActorflowError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise DeviceError(f"{kernel} cannot be bound: {reason}") from error
        if not callable(made):
            raise DeviceError(f"{kernel} was bound to {made!r}, no launch")
        return made
