"""Checkpoints in pieces: who writes what, how ranks vote, and what other ranks read of them."""

import math
import queue
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from disks import LogFs, MakeLink
from error_texts import raises
from rank_threads import RankThreads

from actorflow.checkpoint.errors import CheckpointDropped, CheckpointError
from actorflow.checkpoint.manager import CheckpointManager, SavedFacts
from actorflow.checkpoint.manifest import cover_fault
from actorflow.checkpoint.shard import PieceEntry, WrittenPieces
from actorflow.distributed.distributed_run import DistributedRun
from actorflow.distributed.messages import (
    CheckpointBegun,
    CheckpointEnded,
    CheckpointTimedOut,
    CheckpointVotes,
)
from actorflow.distributed.process_group import ProcessGroup
from actorflow.distributed.sharded_save import (
    Ballot,
    SaveVotes,
    ShardedSaver,
    saved_pieces,
)
from actorflow.distributed.unshard import LocalShard, shard_values
from actorflow.run.restoring import newest_of_all
from compiler.contract.errors import InternalError, PeerFailed
from compiler.contract.placement import Mesh
from compiler.contract.sbp import shard_slices
from compiler.contract.types import ShardingSpec

RUN = Path("/disk/run")
FACTS = SavedFacts(7, "plan", {}, {"batches": 1}, "data")
SHAPES = {
    "rows": (7, 3), "columns": (4, 6), "blocks": (4, 5, 6), "empty": (0, 2), "step": (),
    "gains": (5,),
}  # fmt: skip
SPLITS = {
    "rows": (("data", 0),), "columns": (("model", 1),), "blocks": (("data", 0), ("model", 2)),
    "gains": (("data", 0), ("model", 0)),
}  # fmt: skip


class Ranks:
    """Ranks of a mesh, each with its parts of some variables; `zero` splits them along "data"."""

    def __init__(self, *shape, zero=True):
        names = ("data", "model")[: len(shape)]
        self.mesh = Mesh(names, shape)
        splits = {
            name: tuple([s for s in told if s[0] in names and (zero or s[0] != "data")])
            for name, told in SPLITS.items()
        }
        parts = {n: ShardingSpec(SHAPES[n], s) for n, s in splits.items() if s}
        state = [SimpleNamespace(name=n, sharding=parts.get(n)) for n in SHAPES]
        self.plan = SimpleNamespace(state=tuple(state), mesh=self.mesh)
        self.shards = [
            LocalShard(n, "float32", SHAPES[n], parts[n].splits if n in parts else ())
            for n in sorted(SHAPES)
        ]
        self.count = math.prod(shape)

    def table(self, rank):
        rows = tuple([(s.name, s.dtype, s.shape, s.splits) for s in self.shards])
        return saved_pieces(self.mesh, self.shards, lambda name, value: [rows] * self.count, rank)

    def boxes(self, rank):
        return {
            s.name: shard_slices(ShardingSpec(s.shape, s.splits), self.mesh, rank)
            for s in self.shards
        }

    def values(self, seed, rank):
        return shard_values(self.plan, wholes(seed), rank)


def wholes(seed):
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.normal(size=s), np.float32) for name, s in SHAPES.items()}


def saved(fs, ranks, step=1):
    """Save a step, rank by rank."""
    with CheckpointManager(RUN, fs=fs, keep_last=9) as lead:
        draft = lead.draft(step, FACTS, ranks.table(0).tensors, ranks.count)
        lead.begin(draft, 0)
        written = []
        for rank in range(ranks.count):
            own, values = ranks.table(rank).own, ranks.values(step, rank)
            group = {f"model-rank{rank}": {n: a for n, a in values.items() if n in own}}
            written.append(lead.write(step, draft.attempt, group, own))
        lead.commit(draft, written)


class Locked:
    """A disk of several threads."""

    def __init__(self, fs):
        self.fs, self.guard, self.broken = fs, threading.RLock(), {}

    def __getattr__(self, name):
        def call(*arguments):
            with self.guard:
                where = arguments[0]
                for prefix, error in self.broken.items():
                    if name == "create" and where.name.startswith(prefix):
                        raise error
                return getattr(self.fs, name)(*arguments)

        return call


MESHES = [(1,), (2,), (3,), (4,), (2, 2)]


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("wrote", MESHES, ids=str)
def test_any_mesh_goes_on_from_what_any_other_wrote(wrote, zero):
    fs = LogFs(Path("/disk"))
    saved(fs, Ranks(*wrote, zero=zero))
    reader = CheckpointManager(RUN, fs=fs)
    assert reader.verify(1).num_ranks == math.prod(wrote)
    for shape in MESHES:
        for is_split in (True, False):
            ranks = Ranks(*shape, zero=is_split)
            for rank in range(ranks.count):
                loaded = reader.load(1, boxes=ranks.boxes(rank)).tensors
                for name, array in ranks.values(1, rank).items():
                    assert loaded[name].shape == array.shape
                    assert loaded[name].tobytes() == array.tobytes(), (shape, rank, name)
    for name, array in wholes(1).items():
        assert reader.load(1).tensors[name].tobytes() == array.tobytes()


def test_each_piece_is_written_once_and_ranks_write_about_as_much():
    ranks = Ranks(2, 2, zero=False)
    tables = [ranks.table(rank) for rank in range(4)]
    sizes = [
        sum([4 * math.prod(ranks.values(1, rank)[name].shape) for name in table.own])
        for rank, table in enumerate(tables)
    ]
    assert sum(sizes) == sum([array.nbytes for array in wholes(1).values()])
    assert [table.size_bytes for table in tables] == [sum(sizes)] * 4
    assert max(sizes) - min(sizes) <= 4 * 60, "no more than a part of the largest variable"


class Counting(LogFs):
    """Notes which files are read, and how many bytes of them."""

    num_bytes = 0

    def readinto(self, fd, buffer):
        came = super().readinto(fd, buffer)
        self.num_bytes += came
        return came


def test_a_rank_reads_the_pieces_that_it_needs_and_no_others():
    fs = Counting(Path("/disk"))
    saved(fs, Ranks(4))
    whole, reader = fs.used_bytes(), CheckpointManager(RUN, fs=fs)
    fs.num_bytes = 0
    reader.load(1, boxes={"blocks": (slice(0, 1), slice(0, 5), slice(0, 6))})
    manifest = len(next(d for p, d in fs.files().items() if p.name == "manifest.json"))
    header = 500
    assert fs.num_bytes < manifest + header + 120 < whole


def own_file(step, rank):
    return RUN / f"step-{step:010d}" / f"model-rank{rank}-00001.safetensors"


def flip(fs, step, rank):
    """Flip a bit of the first element of what a rank wrote, which no other rank has."""
    data = fs.inodes[fs._find(own_file(step, rank))].data
    data[8 + int.from_bytes(data[:8], "little")] ^= 1


def take_from_step_1(fs, step, rank):
    """Put the file of another attempt, of the same size, in the place of one."""
    fs.unlink(own_file(step, rank))
    fs.rename(own_file(1, rank), own_file(step, rank))
    saved(fs, Ranks(4), 1)


BREAKS = {
    "damaged": flip,
    "missing": lambda fs, step, rank: fs.unlink(own_file(step, rank)),
    "of another attempt": take_from_step_1,
}


@pytest.mark.parametrize("breaks", BREAKS.values(), ids=BREAKS)
def test_all_go_on_from_the_newest_step_that_is_valid_for_every_rank(breaks):
    fs, ranks, reports = LogFs(Path("/disk")), Ranks(4), []
    for step in (1, 2, 3):
        saved(fs, ranks, step)
    breaks(fs, 3, 3)
    breaks(fs, 2, 1)

    threads, shared = RankThreads(4), Locked(fs)

    def one(rank):
        group = ProcessGroup(rank, threads.gather(rank))
        manager = CheckpointManager(RUN, fs=shared, report=lambda text: None)
        return newest_of_all(manager, None, ranks.boxes(rank), group, reports.append)

    for rank, loaded in enumerate(threads.run(one)):
        assert loaded.manifest.step == 1
        for name, array in ranks.values(1, rank).items():
            assert loaded.tensors[name].tobytes() == array.tobytes()
    # Several ranks may need a piece: the first rank tells what it finds itself, or else another.
    told = [re.match("(rank ([0-9]): )?checkpoint of step ([0-9]) is damaged", r) for r in reports]
    assert {one[3] for one in told} == {"2", "3"}
    assert {(one[2], one[3]) for one in told if one[2]} <= {("3", "3"), ("1", "2")}


def test_a_rank_that_sees_another_directory_is_found():
    full, other, ranks = LogFs(Path("/disk")), LogFs(Path("/disk")), Ranks(2)
    saved(full, ranks)
    threads = RankThreads(2)

    def one(rank):
        group = ProcessGroup(rank, threads.gather(rank))
        manager = CheckpointManager(RUN, fs=other if rank else full)
        with raises(CheckpointError):
            newest_of_all(manager, None, ranks.boxes(rank), group, print)

    threads.run(one)


TILES = {
    "a row is missing": [((0, 0), (2, 3)), ((3, 0), (2, 3))],
    "a row comes twice": [((0, 0), (3, 3)), ((2, 0), (3, 3))],
    "one is missing and one comes twice": [((0, 0), (2, 3)), ((0, 0), (2, 3)), ((4, 0), (1, 3))],
    "a corner is missing": [((0, 0), (5, 2)), ((0, 2), (4, 1))],
    "the end is missing": [((0, 0), (4, 3))],
    "nothing comes": [],
    "all comes twice": [((0, 0), (5, 3)), ((0, 0), (5, 3))],
    "as many, shifted": [((0, 0), (5, 2)), ((0, 1), (5, 1))],
}


@pytest.mark.parametrize("boxes", TILES.values(), ids=TILES)
def test_boxes_that_do_not_make_up_the_whole_are_named(boxes):
    assert cover_fault((5, 3), boxes)


def test_boxes_that_make_up_the_whole_are_right_in_any_order():
    boxes = [((0, 0), (2, 3)), ((2, 0), (3, 1)), ((2, 1), (1, 2)), ((3, 1), (2, 2))]
    assert cover_fault((5, 3), boxes) == ""
    assert cover_fault((5, 3), boxes[::-1]) == ""
    assert cover_fault((), [((), ())]) == ""
    assert cover_fault((0, 4), [((0, 0), (0, 4))]) == ""
    assert cover_fault((0, 4), []) == ""


def test_boxes_that_would_take_too_long_to_compare_are_refused():
    count = 3000
    boxes = [((i, i), (count, 1)) for i in range(count)]
    assert cover_fault((2 * count, count // 2), boxes)


# Votes.


class Noted:
    """A teller that notes what is told."""

    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        return lambda *args, **named: self.told.append((name, *args))


def test_what_was_said_is_found_in_any_order_and_any_number():
    votes = SaveVotes(Noted(), 60.0)
    votes.hear(CheckpointBegun(1, 5, "a"))
    votes.hear(CheckpointBegun(1, 5, "a"))
    assert votes.wait_begun(5) == "a"
    votes.hear(CheckpointEnded(1, 5, True, 0, ""))
    assert votes.wait_ended(5).is_saved
    votes.hear(CheckpointVotes(1, 5, (b"x",)))
    assert votes.wait_votes(5) == (b"x",)
    votes.hear(CheckpointEnded(1, 9, False, 2, "full"))
    assert votes.wait_begun(9) is None, "it ended before it began"
    assert votes.wait_ended(9).reason == "full"
    votes.hear(CheckpointBegun(1, 12, "b"))
    with raises(InternalError):
        votes.wait_begun(10)


def test_who_waits_is_stopped_with_the_first_reason():
    votes = SaveVotes(Noted(), 0)
    votes.stop("rank 2 was ended by SIGKILL")
    votes.stop("another reason")
    for wait in (votes.wait_begun, votes.wait_votes, votes.wait_ended):
        with pytest.raises(PeerFailed, match="rank 2 was ended by SIGKILL"):
            wait(3)


def test_who_waits_in_a_run_that_has_failed_waits_a_little_longer():
    votes = SaveVotes(teller := Noted(), 60.0)
    votes.hurry("the loss is nan", wait_s=0.01)
    votes.hurry("another reason", wait_s=60.0)
    votes.hear(CheckpointVotes(1, 3, (b"x",)))
    assert votes.wait_votes(3) == (b"x",)
    with pytest.raises(PeerFailed, match="the loss is nan"):
        votes.wait_ended(3)
    assert not teller.told
    # A wait that has begun, and one that nothing else would end.
    votes, ended = SaveVotes(teller, 0), []

    def wait():
        with pytest.raises(PeerFailed) as raised:
            votes.wait_ended(3)
        ended.append(str(raised.value))

    thread = threading.Thread(target=wait)
    thread.start()
    votes.hurry("the loss is nan", wait_s=0.01)
    thread.join(60)
    assert ended == ["the loss is nan"]


def test_who_waits_asks_whether_anybody_answers_before_it_says_that_it_waits_too_long():
    teller, told = Noted(), queue.SimpleQueue()
    votes = SaveVotes(teller, 0.001)
    teller.checkpoint_timed_out = lambda *said, is_final: told.put((*said, is_final))
    ended = []
    thread = threading.Thread(target=lambda: ended.append(votes.wait_ended(4)))
    thread.start()
    assert told.get(timeout=60) == (4, 1, False)
    votes.hear(CheckpointBegun(1, 4, "a"))
    votes.hear(CheckpointTimedOut(1, 3, 1, False))  # of an earlier wait
    votes.hear(CheckpointTimedOut(1, 4, 1, False))
    assert told.get(timeout=60) == (4, 1, True)
    votes.hear(CheckpointEnded(1, 4, True, 0, ""))
    thread.join()
    assert told.empty()
    assert ended[0].is_saved


def test_what_is_no_ballot_counts_as_one_that_refuses():
    piece = PieceEntry("w", (0,), (2,), "model-rank0-00001.safetensors", "0" * 32)
    ballot = Ballot(WrittenPieces((), (piece,), has_nan=False))
    assert Ballot.unpack(ballot.pack(), 0) == ballot
    for packed in (b"", b"\xc1", b"\x90", Ballot().pack()[:-1], ballot.pack() + b"x"):
        assert Ballot.unpack(packed, 2).refused.startswith("rank 2 sent no ballot: ")


def saves_of_threads(fs, nan=(), steps=(4, 8)):
    """Save some steps by three ranks; return what each save returned or raised, by rank."""
    ranks, threads = Ranks(3), RankThreads(3)
    members = threads.members()

    def one(rank):
        run = DistributedRun(
            members[rank], 0, obey=lambda m: votes.hear(m), abort=lambda e: votes.stop(str(e))
        )
        votes, manager = SaveVotes(run, 20.0), CheckpointManager(RUN, fs=fs, keep_last=9)
        gather = threads.gather(rank)
        if rank == 0:
            manager.open()
        pieces = saved_pieces(ranks.mesh, ranks.shards, gather, rank)
        saver, came = ShardedSaver(manager, pieces, votes, rank), []
        run.begin()
        gather("no step is granted before all have begun", None)
        for step in steps:
            groups = {"model": ranks.values(step, rank), "optim": {}}
            broken = f"rows{rank}" if (rank, step) in nan else ""
            try:
                came.append(saver.save(step, groups, FACTS, broken))
            except CheckpointError as error:
                came.append(error)
        gather("end", None)
        manager.close()
        return came

    return threads.run(one)


def test_all_write_and_the_first_rank_commits_when_all_have_voted():
    disk = LogFs(Path("/disk"))
    assert saves_of_threads(Locked(disk)) == [["", ""]] * 3
    made = [op.name for op in disk.log if isinstance(op, MakeLink) and "." in op.name[1:]]
    for begin in (0, 4):
        shards, manifest = made[begin : begin + 3], made[begin + 3]
        assert {name.split("-")[1] for name in shards} == {"rank0", "rank1", "rank2"}
        assert manifest == "manifest.json"
    loaded = CheckpointManager(RUN, fs=disk).latest()
    assert loaded.manifest.step == 8
    assert loaded.manifest.data_state == {"batches": 1}
    for name, array in wholes(8).items():
        assert loaded.tensors[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_that_cannot_write_is_named_on_all_and_nothing_is_left(rank):
    disk = LogFs(Path("/disk"))
    fs = Locked(disk)
    fs.broken = {f"model-rank{rank}": OSError(28, "No space left on device", "/disk")}
    ends = saves_of_threads(fs, steps=(4,))
    for number, (error,) in enumerate(ends):
        assert "no space for a checkpoint in /disk/run" in str(error)
        if number != rank:
            assert isinstance(error, CheckpointDropped)
            assert error.rank == rank
            assert str(error).startswith(f"rank {rank} could not write its part of a checkpoint")
    assert disk.listdir(RUN) == [".lock"]
    assert disk.open_files == {}


def test_a_manifest_that_cannot_be_written_drops_the_checkpoint_on_all():
    disk = LogFs(Path("/disk"))
    fs = Locked(disk)
    fs.broken = {"manifest": OSError(5, "Input/output error", "/disk")}
    for (error,) in saves_of_threads(fs, steps=(4,)):
        assert "EIO (Input/output error)" in str(error)
    assert disk.listdir(RUN) == [".lock"]


def test_the_next_one_is_saved_after_one_that_was_dropped_for_a_nan_which_all_are_told():
    disk = LogFs(Path("/disk"))
    assert saves_of_threads(Locked(disk), nan={(2, 4), (1, 4)}) == [["rows1", ""]] * 3
    assert CheckpointManager(RUN, fs=disk).steps() == (8,)
