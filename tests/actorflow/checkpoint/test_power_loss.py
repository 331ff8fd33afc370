"""Power is cut after every operation of a run, and every outcome that POSIX allows is tried at
random.

Two things must hold on every disk that is left: the newest valid checkpoint is at least the last
one acknowledged, and nothing incomplete has a final name. Taking any line out of the protocol must
break one.
"""

from pathlib import Path
from random import Random

import numpy as np
import pytest
from disks import LogFs, Mark
from error_texts import raises

from actorflow.checkpoint.errors import CheckpointError

DROPS = (0.0, 0.1, 0.5, 0.9, 1.0)
RUN = Path("/disk/run")


class Kill(BaseException):
    """The process is gone: no handler of its own can do anything more."""


class Edited:
    """An `Fs` with a line of the protocol left out or moved: `edit` is True to swallow a call."""

    def __init__(self, fs, edit):
        self.fs, self.edit = fs, edit
        self.paths, self.renamed, self.moved = {}, "", {}

    def __getattr__(self, name):
        def call(*arguments):
            path = self.paths.get(arguments[0], arguments[0])
            if self.edit(self, name, path, *arguments[1:]):
                return None
            result = getattr(self.fs, name)(*(self.real(a) for a in arguments))
            if name == "create":
                self.paths[result] = path
            if name == "rename":
                self.renamed = arguments[1].name
            return result

        return call

    def real(self, argument):
        for source, target in self.moved.items():
            if isinstance(argument, Path) and (argument == source or source in argument.parents):
                return target / argument.relative_to(source)
        return argument


class Killing:
    """An `Fs` of a process that is killed at the k-th call."""

    def __init__(self, fs, k):
        self.fs, self.k, self.num_calls = fs, k, 0

    def __getattr__(self, name):
        def call(*arguments):
            self.num_calls += 1
            if self.num_calls > self.k:
                raise Kill
            return getattr(self.fs, name)(*arguments)

        return call


def no_fsync_of(prefix):
    return lambda fs, name, path, *_: name == "fsync" and path.name.startswith(prefix)


def no_sync_after_rename_to(prefix):
    def edit(fs, name, path, *_):
        return name == "fsync_dir" and path == RUN and fs.renamed.startswith(prefix)

    return edit


def no_sync_of_run_at_open(fs, name, path, *_):
    return name == "fsync_dir" and path == RUN and not fs.renamed


def no_sync_of_tmp(fs, name, path, *_):
    return name == "fsync_dir" and path.name.startswith(".tmp-")


def no_sync_of_parent(fs, name, path, *_):
    return name == "fsync_dir" and path == RUN.parent


def no_rename_to_final(fs, name, path, *rest):
    return name == "rename" and rest[0].name.startswith("step-")


def acknowledged_before_rename(fs, name, path, *rest):
    if name == "rename" and rest[0].name.startswith("step-"):
        fs.fs.mark(f"ack {int(rest[0].name[5:])}")
    return False


def collected_before_durable(fs, name, path, *_):
    # The sync after the commit waits until the collection is done with.
    if name == "fsync_dir" and path == RUN and fs.renamed.startswith("step-"):
        return True
    if name == "fsync_dir" and path == RUN and fs.renamed.startswith(".trash-"):
        return True
    if name == "rmdir":
        fs.fs.rmdir(fs.real(path))
        fs.fs.fsync_dir(RUN)
        return True
    return False


def deleted_in_place(fs, name, path, *rest):
    if name == "rename" and rest[0].name.startswith(".trash-"):
        fs.moved[rest[0]] = path
        return True
    return False


MUTANTS = {
    "no fsync of a model shard": no_fsync_of("model"),
    "no fsync of an optimizer shard": no_fsync_of("optim"),
    "no fsync of the manifest": no_fsync_of("manifest"),
    "no fsync of the tmp directory": no_sync_of_tmp,
    "no fsync of the run directory after the commit": no_sync_after_rename_to("step-"),
    "no rename to the final name": no_rename_to_final,
    "parent of the run directory never synced": no_sync_of_parent,
    "acknowledged before the rename": acknowledged_before_rename,
    "collected before the commit is durable": collected_before_durable,
    "deleted under the final name": deleted_in_place,
    "no fsync between rename to trash and deletion": no_sync_after_rename_to(".trash-"),
}


def three_saves(make_run, edit=None, keep_last=1):
    fs = LogFs(Path("/disk"))
    run = make_run(fs if edit is None else Edited(fs, edit), RUN, keep_last)
    with run.manager:
        for step in (1, 2, 3):
            run.save(step)
            fs.mark(f"ack {step}")
    assert run.reports == []
    return fs


def tree(disk, number=0):
    inode = disk.inodes[number]
    if inode.entries is None:
        return bytes(inode.data)
    return tuple((name, tree(disk, child)) for name, child in sorted(inode.entries.items()))


def violations(make_run, fs, num_drop_sets, first=0):
    """Yield (number of operations, what is wrong) over crashes; equal disks are looked at once."""
    random = Random(0)
    seen = set()
    acked = 0
    for k in range(len(fs.log) + 1):
        if k and isinstance(fs.log[k - 1], Mark):
            acked = int(fs.log[k - 1].text.removeprefix("ack "))
        if k < first:
            continue
        for n in range(num_drop_sets):
            disk = fs.crash(k, random, DROPS[n % len(DROPS)])
            key = (tree(disk), acked)
            if key not in seen:
                seen.add(key)
                yield from ((k, wrong) for wrong in wrongs(make_run, disk, acked))


def wrongs(make_run, disk, acked):
    run = make_run(disk, RUN)
    try:
        for step in run.manager.steps():
            run.manager.verify(step)
    except CheckpointError as error:
        yield f"incomplete under a final name: {error}"
        return
    with run.manager:
        loaded = run.manager.latest()
        step = 0 if loaded is None else loaded.manifest.step
        if step < acked:
            yield f"acknowledged {acked}, but restored {step}"
        if loaded is not None and loaded.manifest.seed == 7:
            run.assert_holds(step, loaded)
        left = [name for name in disk.listdir(RUN) if not name.startswith("step-")]
        if left != [".lock"]:
            yield f"left after recovery: {left}"


@pytest.mark.parametrize("keep_last", [1, 2])
def test_no_power_cut_loses_or_spoils_an_acknowledged_checkpoint(make_run, keep_last):
    fs = three_saves(make_run, keep_last=keep_last)
    assert len(fs.log) > 60
    assert list(violations(make_run, fs, num_drop_sets=100)) == []


@pytest.mark.parametrize("name", MUTANTS)
def test_every_line_of_the_protocol_is_needed(make_run, name):
    fs = three_saves(make_run, MUTANTS[name])
    assert next(violations(make_run, fs, num_drop_sets=40), None) is not None


def killed_and_reopened(make_run, k, edit=None):
    """Three saves, the third killed at call k; then a new process opens and saves again.

    Returns the disk, where the new process starts in its log, and the names that the kill left.
    """
    fs = LogFs(Path("/disk"))
    run = make_run(fs, RUN, 1)
    with run.manager:
        for step in (1, 2):
            run.save(step)
            fs.mark(f"ack {step}")
    doomed = Killing(fs, k)
    run = make_run(doomed, RUN, 1)
    try:
        with run.manager:
            run.save(3)
            fs.mark("ack 3")
        left = None
    except Kill:
        left = fs.listdir(RUN)
    fs.kill_processes()
    first = len(fs.log)
    run = make_run(fs if edit is None else Edited(fs, edit), RUN, 1)
    with run.manager:
        assert run.manager.latest().manifest.step >= 2
        run.save(4)
        fs.mark("ack 4")
    return fs, first, left


def test_a_power_cut_after_a_kill_at_any_call_and_a_restart_is_survived(make_run):
    k, left = 0, []
    while left is not None:
        fs, first, left = killed_and_reopened(make_run, k)
        assert list(violations(make_run, fs, 5, first)) == [], f"killed at call {k}"
        k += 1
    assert k > 40


def test_what_a_killed_process_renamed_is_synced_before_it_is_deleted(make_run):
    num_cases = 0
    for k in range(60):
        fs, first, left = killed_and_reopened(make_run, k, no_sync_of_run_at_open)
        if left and any(name.startswith(".trash-") for name in left):
            num_cases += 1
            if next(violations(make_run, fs, 40, first), None) is not None:
                return
    pytest.fail(f"leaving the sync out did no harm in {num_cases} cases")


def test_replacing_a_step_never_leaves_the_run_without_it(make_run):
    fs = LogFs(Path("/disk"))
    run = make_run(fs, RUN, keep_last=1)
    with run.manager:
        run.save(1)
        fs.mark("ack 1")
        run.save(1, {"model": {"w": np.zeros(3)}}, seed=8)
        fs.mark("ack 1")
        assert run.manager.latest().manifest.seed == 8
    assert list(violations(make_run, fs, num_drop_sets=40)) == []


def test_a_checkpoint_found_in_place_is_synced_before_it_is_acknowledged(make_run):
    def scenario(edit):
        fs = LogFs(Path("/disk"))
        failing = no_sync_after_rename_to("step-")
        state = {"fails": True}

        def outer(wrapped, name, path, *rest):
            if state["fails"] and failing(wrapped, name, path, *rest):
                state["fails"] = False
                raise OSError(5, "Input/output error", str(path))
            return edit(wrapped, name, path, *rest)

        run = make_run(Edited(fs, outer), RUN)
        with run.manager:
            with raises(CheckpointError):
                run.save(1)
            run.save(1)
            fs.mark("ack 1")
        return fs

    good = scenario(lambda *_: False)
    assert list(violations(make_run, good, num_drop_sets=20)) == []
    bad = scenario(no_sync_after_rename_to("step-"))
    assert list(violations(make_run, bad, num_drop_sets=20)) != []
