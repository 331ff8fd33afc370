"""What a plan is made for: a `Target` for each device of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from actorflow.compile.targets import HostTarget, SimTarget
from compiler.contract.placement import SINGLE_RANK, Device, DeviceKind, RankContext
from compiler.graph.target import Hardware, Target

if TYPE_CHECKING:  # a job of the host loads no kernels of GPUs
    from actors.kernels.cuda.cudnn_library import CudnnLibrary


def hardware_for(
    devices: Sequence[Device],
    gpu: str = "",
    cudnn: CudnnLibrary | None = None,
    ranks: RankContext = SINGLE_RANK,
) -> Hardware:
    """Return what a plan for some devices of some ranks is made for; see `target_for`."""
    targets = [target_for(device, gpu, cudnn) for device in devices]
    return Hardware(tuple(devices), tuple(targets), ranks)


def target_for(device: Device, gpu: str = "", cudnn: CudnnLibrary | None = None) -> Target:
    """Return what is known of a device.

    `gpu` is the name of the GPU that a CUDA device is, `cudnn` the library whose kernels are
    planned there, if any. Raises LookupError for a GPU that there is no description of.
    """
    if device.kind is DeviceKind.CUDA:
        # Late: a job of the host loads no kernels of GPUs.
        from actorflow.compile.cuda_target import CudaTarget

        return CudaTarget(device, gpu, cudnn)
    return HostTarget() if device.kind is DeviceKind.HOST else SimTarget(device)
