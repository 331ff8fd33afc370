"""The ranks of a job: this process among them, and who shares the work of a step.

A script that is only asked for its plan (`actorflow plan`, `simulate`) is alone whatever the mesh;
then the ranks are those of the question.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from actorflow.environment.settings import Settings
from actorflow.jobs.job_spec import CAPTURING
from actorflow.options.job_options import JobOptions
from actorflow.options.run_spec import check_rank
from compiler.contract.placement import (
    BETWEEN_GPUS,
    INSIDE_A_HOST,
    SINGLE_RANK,
    SINGLE_RANK_MESH,
    Device,
    DeviceKind,
    Hosts,
    Mesh,
    RankContext,
    joined,
    on_hosts,
)

if TYPE_CHECKING:
    from actorflow.distributed.process_group import ProcessGroup


def mesh_of(options: JobOptions) -> Mesh:
    """Return the ranks that share the work of a step."""
    return options.mesh or SINGLE_RANK_MESH


def group_of(job: str, options: JobOptions) -> ProcessGroup:
    """Return this process among a job's ranks: alone, where it neither trains nor shares."""
    from actorflow.distributed.process_group import SINGLE_PROCESS, process_group_from_env

    mesh = mesh_of(options)
    is_alone = CAPTURING.get() or (mesh.num_ranks == 1 and not options.train)
    return SINGLE_PROCESS if is_alone else process_group_from_env(os.environ, job, mesh)


def devices_of(options: JobOptions) -> tuple[Device, ...]:
    """Return what a job runs on; ACTORFLOW_DEVICE says so for one that names none."""
    return options.placed_on or Settings.from_env(os.environ).devices


def ranks_of(job: str, options: JobOptions, rank: int | None) -> RankContext:
    """Return who shares the work of a step; `rank` is whose plan it is, by default our own."""
    context, mesh = CAPTURING.get(), mesh_of(options)
    if context is not None and context.count > 1:
        return context
    is_launched = context is None and "RANK" in os.environ and mesh.num_ranks > 1
    group = group_of(job, options) if is_launched else None
    if rank is None:
        rank = group.rank if group else (context or SINGLE_RANK).rank
    check_rank(rank, mesh)
    if context is not None and context.hosts is not None:
        return on_hosts(mesh, context.hosts, rank)
    kinds = {device.kind for device in devices_of(options)} if mesh.num_ranks > 1 else ()
    link = BETWEEN_GPUS if kinds == {DeviceKind.CUDA} else INSIDE_A_HOST
    sizes = group.host_sizes if group else ()
    if not sizes:
        return joined(mesh, link, rank)
    between = Settings.from_env(os.environ).link
    return on_hosts(mesh, Hosts(sizes, link, between), rank)
