"""Whether a plan may run here: its ranks, its kernels, its proof; and their building."""

from __future__ import annotations

import re

from actorflow.compile.gpus import gpu_of, has_cudnn, is_cuda
from actorflow.compile.native import NATIVE, build, choosing
from actorflow.compile.plugins import load_plugins
from actorflow.compile.targets import hardware_for
from actorflow.logs import logger
from actorflow.proof.prove import prove
from actorflow.run.among import ONE_RANK, Among
from actorflow.run.devices import devices_of
from actorflow.settings import Settings
from actors.kernels.cuda.gpu import known_gpus
from compiler.errors import CompileError, PlanFormatError
from compiler.plan import Plan

_VERSION = re.compile(r"\b(?:host|cuda)-\d+")
"""What of a fingerprint says which kernels there are; the rest is with what they were built."""


def make_ready(plan: Plan, settings: Settings, among: Among = ONE_RANK) -> None:
    """Prove a plan and build its kernels.

    Only ranks that are among others run a plan of several.
    Raises CompileError, OutOfMemory or PlanFormatError where it cannot run here.
    """
    if among is ONE_RANK:
        _check_ranks(plan)
    _check_gpu(plan)
    load_plugins()  # the ops and kernels of a plan from a file may be theirs
    with choosing(settings, devices_of(plan), deterministic=False) as is_on:
        _check_target(plan, is_native=is_on)
        # Proven before anything is built: what a C compiler gets comes from a file.
        prove(plan)
        _build(plan)


def _check_ranks(plan: Plan) -> None:
    mesh = plan.mesh
    if mesh.num_ranks > 1:
        raise CompileError(
            f"plan {plan.name!r} is of one of {mesh.num_ranks} ranks (mesh {mesh}), and this"
            f" process is alone with it: call the job in a script that 'actorflow launch -n"
            f" {mesh.num_ranks}' starts, or compile the job without mesh. A plan of one rank can be"
            " printed, and simulated ('actorflow simulate')"
        )


def _check_gpu(plan: Plan) -> None:
    """Refuse a plan for a GPU that nobody described here; the one that is here is asked later."""
    name = gpu_of(plan)
    devices = [*[a.device for a in plan.arenas], *[s.device for s in plan.streams]]
    if any([is_cuda(device) for device in devices]) and name not in known_gpus():
        raise PlanFormatError(
            f"plan {plan.name!r} was compiled for a GPU called {name!r}, and there are descriptions"
            f" of {', '.join(known_gpus())} here; compile the job again"
        )


def _check_target(plan: Plan, *, is_native: bool) -> None:
    """Refuse a plan that was made for other kernels than this machine has."""
    names = dict.fromkeys([launch.kernel for actor in plan.actors for launch in actor.launches])
    native = [name for name in names if name.startswith(NATIVE)]
    if native and not is_native:
        raise PlanFormatError(
            f"plan {plan.name!r} was compiled for native kernels ({', '.join(native)}), and here"
            " is no C compiler, or ACTORFLOW_NATIVE=0 forbids them; compile the job again"
        )
    devices, gpu, there = devices_of(plan), gpu_of(plan), plan.target
    here = hardware_for(devices, gpu, uses_cudnn=has_cudnn(plan)).fingerprint
    if _VERSION.findall(here) != _VERSION.findall(there):
        raise PlanFormatError(
            f"plan {plan.name!r} was compiled for kernels {there!r}, this actorflow has {here!r};"
            " compile the job again"
        )
    if here != there:
        logger.warning(
            "plan %r was compiled with %s and runs with %s: results may differ in their last bits",
            plan.name,
            there,
            here,
        )


def _build(plan: Plan) -> None:
    """Build the native kernels of a plan, once it is proven that there is nothing else in them."""
    if not build(plan):
        raise PlanFormatError(
            f"the C compiler of this machine refuses what plan {plan.name!r} needs (the log has its"
            " words); compile the job again, and numpy's kernels take its place"
        )
