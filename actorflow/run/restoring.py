"""Where a run goes on: the newest checkpoint that is valid on all ranks, and is of this run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from actorflow.checkpoint.errors import CheckpointError
from actorflow.checkpoint.fs import MAX_STEP
from actorflow.checkpoint.manifest import Expected, Manifest
from actorflow.compile.plan_facts import saved_variables
from actorflow.data import DataError, DataSource, items_of
from actorflow.distributed.process_group import (
    SINGLE_PROCESS,
    ProcessGroup,
    source_difference,
)
from actorflow.options.run_spec import CHANGED
from actorflow.run.saving import ITEMS, SEED, STEP, job_state, kernels_of
from actorflow.tensor.initial_values import whole_type
from compiler.contract.codec import printable
from compiler.contract.errors import CompileError
from compiler.contract.plan import Plan
from compiler.contract.sbp import shard_slices
from compiler.graph.target import GOOD_STEPS, LOSS_SCALE, SKIPPED

if TYPE_CHECKING:
    from actorflow.checkpoint.reader import CheckpointReader, LoadedCheckpoint
    from actorflow.options.run_spec import RunSpec

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class RestoredState:
    """Where a run begins: steps done, and the rank's part of the value of every variable."""

    step: int
    values: Mapping[str, Array]
    is_resumed: bool = False


def start_from(
    manager: CheckpointReader,
    plan: Plan,
    run_spec: RunSpec,
    seed: int,
    report: Callable[[str], None],
    group: ProcessGroup = SINGLE_PROCESS,
    *,
    at_most: int = MAX_STEP,
    is_whole: bool = False,
) -> RestoredState | None:
    """Restore the source's position and return step and variables of the newest checkpoint.

    None where there is no checkpoint up to the step `at_most`. Of several ranks each reads what it
    needs of the newest one that is valid for all, or with `is_whole` all. Raises CheckpointUnfit
    when the variables of all of them are other than the plan's, CompileError for another seed,
    DataError for other data; where the run may have changes these are a line of the report.
    """
    boxes = None if is_whole else own_boxes(plan, group.rank)
    expected = expected_of(plan, group)
    checkpoint = newest_of_all(manager, expected, boxes, group, report, at_most)
    if checkpoint is None:
        return None
    manifest, source = checkpoint.manifest, run_spec.data
    position, values = manifest.data_state or {}, checkpoint.tensors
    # Data and seed are checked before `restore`, which changes the source.
    is_other_data = manifest.data_fingerprint != source.fingerprint()
    if run_spec.resume != CHANGED:
        _check_unchanged(manifest, source, seed, is_other_data=is_other_data)
    changes = []
    if is_other_data:
        apart = source_difference(source.fingerprint(), printable(manifest.data_fingerprint))
        position, text = _changed_position(manifest, source)
        changes.append(f"the data is another ({apart}) and {text}")
    if manifest.seed != seed:
        changes.append(f"the seed is {seed} and not {manifest.seed}")
        values = {n: np.full_like(a, seed) if n == SEED else a for n, a in values.items()}
    if changes:
        report(f"the checkpoint of step {manifest.step} continues: {'; '.join(changes)}")
    if manifest.has_nan:
        report(_of_nan(manifest.step, manager.newest_sound(manifest.step)))
    if manifest.plan_hash != plan.graph_hash:
        report(
            f"the checkpoint of step {manifest.step} was made by another version of this job: its"
            " state fits and is restored, but the run will not equal an uninterrupted one"
        )
    else:
        _compare_kernels(manifest.step, manifest.config.get("kernels"), plan, report)
    source.restore(position)
    return RestoredState(manifest.step, values)


def _check_unchanged(
    manifest: Manifest, source: DataSource, seed: int, *, is_other_data: bool
) -> None:
    """Raise DataError for other data than that of a checkpoint, CompileError for another seed."""
    mend = "or another checkpoint directory; resume='changed' continues with the difference"
    if is_other_data:
        raise DataError(
            f"the checkpoint of step {manifest.step} was trained on other data: it has fingerprint"
            f" {printable(manifest.data_fingerprint)!r}, this source {source.fingerprint()!r}. Give"
            f" the same data (same files, same seq, batch and seed), {mend}"
        )
    if manifest.seed != seed:
        raise CompileError(
            f"the checkpoint of step {manifest.step} was made with seed {manifest.seed}, this job"
            f" has seed {seed}; use the same seed, {mend}"
        )


def _changed_position(manifest: Manifest, source: DataSource) -> tuple[Mapping[str, Any], str]:
    """Return where other data than that of a checkpoint goes on, and that in words.

    After as many items as the run has seen, to the nearest batch, where both positions are numbers
    of batches of one kind of source; else the source stays where it stands.
    """
    state, now = manifest.data_state or {}, source.state()
    count, (size, name) = manifest.config.get(ITEMS), items_of(source)
    is_alike = state.keys() == now.keys() == {"kind", "batches"} and state["kind"] == now["kind"]
    if not is_alike or not isinstance(count, int) or not isinstance(state["batches"], int):
        return now, "begins where the source stands"
    seen = state["batches"] * count
    batches = round(seen / max(size, 1))
    text = f"goes on after {batches} batches of {size}, for {seen:,} {name} were seen"
    return {**state, "batches": batches}, text


def own_boxes(plan: Plan, rank: int) -> dict[str, tuple[slice, ...]]:
    """Return what a rank needs of a checkpoint: its box of each variable of its plan, by name."""
    saved, boxes = {*saved_variables(plan)}, {}
    for variable in plan.state:
        if variable.name in saved:
            part, whole = variable.sharding, whole_type(plan, variable)
            boxes[variable.name] = (
                tuple([slice(0, extent) for extent in whole.shape])
                if part is None
                else shard_slices(part, plan.mesh, rank)
            )
    return boxes


# Each rank reads and verifies what it needs, so one may find damage where the others find none. All
# go on from the newest step that is valid for every one: each names the newest that is valid for
# it, and those that are above the lowest of them look again below it, until all name the same.


def newest_of_all(
    manager: CheckpointReader,
    expected: Expected,
    boxes: Mapping[str, tuple[slice, ...]] | None,
    group: ProcessGroup,
    report: Callable[[str], None],
    at_most: int = MAX_STEP,
) -> LoadedCheckpoint | None:
    """Return this rank's part of the newest checkpoint that is valid for all; None without one.

    It is of a step up to `at_most`; without `boxes` it is whole.

    All ranks call it at the same place. The first one reports what any of them has skipped, and
    why. Raises as `CheckpointReader.latest`, and CheckpointError where only some find one.
    """
    problems: list[str] = []
    loaded = manager.latest(expected, boxes, report=problems.append, at_most=at_most)
    while True:
        step = -1 if loaded is None else loaded.manifest.step
        row = (step, tuple(problems))
        rows = cast("list[Any]", group.all_gather_object("find the checkpoint to go on from", row))
        problems.clear()
        if group.is_first:
            _report_skipped([told for _, told in rows], report)
        steps = [step for step, _ in rows]
        lowest = min(steps)
        if lowest == max(steps):
            break
        if lowest < 0:
            raise CheckpointError(
                f"rank {steps.index(lowest)} finds no checkpoint in {manager.directory}, and rank"
                f" {steps.index(max(steps))} finds one of step {max(steps)}: give all ranks one"
                " directory, on a disk that all hosts share"
            )
        if step > lowest:
            loaded = None  # before the next one takes memory
            loaded = manager.latest(expected, boxes, report=problems.append, at_most=lowest)
    # Until all have read it nobody trains, and writes others that would have it removed.
    group.all_gather_object("read the checkpoint", None)
    return loaded


def _report_skipped(told: list[tuple[str, ...]], report: Callable[[str], None]) -> None:
    """Report each problem once; one that the first rank does not have with the rank that does."""
    first: dict[str, int] = {}
    for rank, problems in enumerate(told):
        for problem in problems:
            first.setdefault(problem, rank)
    for problem, rank in first.items():
        report(f"rank {rank}: {problem}" if rank else problem)


def _of_nan(step: int, sound: int | None) -> str:
    text = f"the checkpoint of step {step} holds NaN: the run began to fail before it; "
    if sound is None:
        return text + "there is no earlier one without NaN"
    return text + (
        f"the newest one without NaN is of step {sound}: to continue from there, move the newer"
        " ones out of the directory"
    )


def _compare_kernels(step: int, wrote: Any, plan: Plan, report: Callable[[str], None]) -> None:
    """Report work that both plans do, each with another kernel; older checkpoints do not say."""
    if not isinstance(wrote, Mapping):
        return
    ours = kernels_of(plan)
    others = [work for work in ours if wrote.get(work, ours[work]) != ours[work]]
    if others:
        first = others[0]
        report(
            f"the checkpoint of step {step} continues with other kernels ({first}: {ours[first]} in"
            f" place of {printable(str(wrote[first]))}; {len(others)} in all): not bit for bit;"
            " deterministic=True fixes the choice"
        )


def expected_of(plan: Plan, group: ProcessGroup = SINGLE_PROCESS) -> Expected:
    """Return what a checkpoint must hold for a plan: the variables of all ranks, whole.

    Whether steps may be skipped, and losses scaled, is a choice of each run: what there is of it is
    not asked for.
    """
    tensors = job_state(plan, group).types
    counter = STEP if STEP in tensors else ""
    return Expected(tensors, frozenset((SKIPPED, LOSS_SCALE, GOOD_STEPS)), counter)
