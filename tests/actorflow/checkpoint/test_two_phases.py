"""Three writers of one checkpoint, their steps in any order, and a power cut after any of them.

What a disk holds afterwards is the old or the new checkpoint, whole. Without any one line of the
protocol some cut leaves less.
"""

from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from disks import LogFs, Mark

from actorflow.checkpoint.errors import CheckpointError
from actorflow.checkpoint.manager import CheckpointManager, SavedFacts
from actorflow.checkpoint.shard import TensorEntry

RUN = Path("/disk/run")
RANKS = 3
DROPS = (0.0, 0.1, 0.5, 0.9, 1.0)
TENSORS = (TensorEntry("w", "float64", (6, 40)), TensorEntry("m", "float32", (3, 30)))
FACTS = SavedFacts(7, "plan", {}, {"batches": 1}, "data")


def whole(step):
    rng = np.random.default_rng(step)
    return {t.name: rng.standard_normal(t.shape).astype(t.dtype) for t in TENSORS}


def pieces_of(step, rank):
    """Return what a rank writes, by group, and where it lies: two rows of w, and one of m."""
    values = whole(step)
    groups = {
        f"model-rank{rank}": {"w": values["w"][2 * rank : 2 * rank + 2]},
        f"optim-rank{rank}": {"m": values["m"][rank : rank + 1]},
    }
    return groups, {"w": ((6, 40), (2 * rank, 0)), "m": ((3, 30), (rank, 0))}


class Without:
    """An `Fs` that leaves out calls."""

    def __init__(self, fs, is_left_out):
        self.fs, self.is_left_out, self.names = fs, is_left_out, {}

    def __getattr__(self, name):
        def call(*arguments):
            where = self.names.get(arguments[0], arguments[0])
            if self.is_left_out(name, where):
                return None
            result = getattr(self.fs, name)(*arguments)
            if name == "create":
                self.names[result] = arguments[0]
            return result

        return call


def saves(edits=None, steps=(1, 2)):
    """Return a disk on which three ranks saved steps, and the parts of its log for each save.

    The parts are: what the first rank began, what each rank wrote, what the first rank committed.
    """
    edits, disk = edits or {}, LogFs(Path("/disk"))
    views = [Without(disk, edits.get(rank, lambda name, where: False)) for rank in range(RANKS)]
    managers = [CheckpointManager(RUN, fs=fs, keep_last=1) for fs in views]
    parts = []
    with managers[0] as lead:
        opened = len(disk.log)
        for step in steps:
            ends = [len(disk.log)]
            draft = lead.draft(step, FACTS, TENSORS, RANKS)
            lead.begin(draft, 0)
            ends.append(len(disk.log))
            written = []
            for rank, manager in enumerate(managers):
                groups, places = pieces_of(step, rank)
                written.append(manager.write(step, draft.attempt, groups, places))
                ends.append(len(disk.log))
            lead.commit(draft, written)
            disk.mark(f"ack {step}")
            lead.collect(step)
            ends.append(len(disk.log))
            parts.append([disk.log[a:b] for a, b in pairwise(ends)])
        head = disk.log[:opened]
    return disk, head, parts


def interleaved(segments, random):
    """Return what several writers did as one log; of each the order stays."""
    queues = [list(segment) for segment in segments]
    merged = []
    while any(queues):
        queue = random.choice([queue for queue in queues if queue])
        merged.append(queue.pop(0))
    return merged


def in_some_order(head, parts, random, early=None):
    """Return a log; with `early` the commit does not wait for the last operations of that rank."""
    log = list(head)
    for begun, *written, committed in parts:
        log += begun
        if early is None:
            log += [*interleaved(written, random), *committed]
            continue
        others = [segment for rank, segment in enumerate(written) if rank != early]
        log += interleaved(others, random)
        log += interleaved([written[early], committed], random)
    return log


def tree(disk, number=0):
    inode = disk.inodes[number]
    if inode.entries is None:
        return bytes(inode.data)
    return tuple([(name, tree(disk, child)) for name, child in sorted(inode.entries.items())])


def wrongs(disk, acked):
    """Yield what is wrong with what a power cut left."""
    manager = CheckpointManager(RUN, fs=disk, report=lambda text: None)
    try:
        for step in manager.steps():
            manager.verify(step)
    except CheckpointError as error:
        yield f"incomplete under a final name: {error}"
        return
    with manager:
        loaded = manager.latest()
        step = 0 if loaded is None else loaded.manifest.step
        if step < acked:
            yield f"acknowledged {acked}, but restored {step}"
        for name, array in whole(step).items() if loaded is not None else ():
            if loaded.tensors[name].tobytes() != array.tobytes():
                yield f"{name} of step {step} has other values"
        left = [name for name in disk.listdir(RUN) if not name.startswith("step-")]
        if left != [".lock"]:
            yield f"left after recovery: {left}"


def violations(disk, log, num_drop_sets, seed=0):
    """Yield what is wrong after a cut at every point of a log; equal disks are looked at once."""
    random, seen, acked = Random(seed), set(), 0
    disk.log = log
    for k in range(len(log) + 1):
        if k and isinstance(log[k - 1], Mark):
            acked = int(log[k - 1].text.removeprefix("ack "))
        for n in range(num_drop_sets):
            cut = disk.crash(k, random, DROPS[n % len(DROPS)])
            key = (tree(cut), acked)
            if key not in seen:
                seen.add(key)
                yield from [(k, wrong) for wrong in wrongs(cut, acked)]


@pytest.mark.parametrize("seed", range(2))
def test_any_power_cut_leaves_the_old_or_the_new_checkpoint_whole(seed):
    disk, head, parts = saves()
    log = in_some_order(head, parts, Random(seed))
    assert len(log) > 70
    assert list(violations(disk, log, 5, seed)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_any_power_cut_with_any_losses_leaves_the_old_or_the_new_checkpoint_whole(seed):
    disk, head, parts = saves()
    assert list(violations(disk, in_some_order(head, parts, Random(seed)), 100, seed)) == []


def no_sync_of(name):
    return lambda call, where: call == "fsync" and where.name.startswith(name)


def no_sync_of_directory(is_it):
    return lambda call, where: call == "fsync_dir" and is_it(where)


MUTANTS = {
    **{f"rank {r} does not sync its model": {r: no_sync_of("model")} for r in range(RANKS)},
    **{f"rank {r} does not sync its optimizer": {r: no_sync_of("optim")} for r in range(RANKS)},
    "no fsync of the manifest": {0: no_sync_of("manifest")},
    "no fsync of the tmp directory": {
        0: no_sync_of_directory(lambda path: path.name.startswith(".tmp-"))
    },
    "no fsync of the run directory": {0: no_sync_of_directory(lambda path: path == RUN)},
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_sync_is_needed(name):
    disk, head, parts = saves(MUTANTS[name])
    assert next(violations(disk, in_some_order(head, parts, Random(1)), 40), None) is not None


@pytest.mark.parametrize("rank", range(RANKS))
def test_each_vote_is_needed(rank):
    disk, head, parts = saves()
    found = (
        wrong
        for seed in range(4)
        for wrong in violations(disk, in_some_order(head, parts, Random(seed), rank), 10)
    )
    assert next(found, None) is not None


def test_pieces_that_do_not_make_up_the_tensors_are_no_checkpoint():
    disk = LogFs(Path("/disk"))
    with CheckpointManager(RUN, fs=disk) as lead:
        draft = lead.draft(1, FACTS, TENSORS, RANKS)
        lead.begin(draft, 0)
        written = [lead.write(1, draft.attempt, *pieces_of(1, rank)) for rank in (0, 2)]
        with pytest.raises(CheckpointError, match="has 240 elements, and its pieces have 160"):
            lead.commit(draft, written)
        assert disk.listdir(RUN) == [".lock"]
        assert lead.latest() is None


def test_what_is_no_attempt_is_not_written_to():
    disk = LogFs(Path("/disk"))
    with CheckpointManager(RUN, fs=disk) as lead:
        for attempt in ("../../etc", "", "0" * 31, "0" * 33, "0" * 32 + "/x"):
            with pytest.raises(CheckpointError, match="expected 32 hexadecimal digits"):
                lead.write(1, attempt, *pieces_of(1, 0))
