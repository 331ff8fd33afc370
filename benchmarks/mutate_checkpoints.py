"""Change checkpoints and sign them again: each is refused with an error of ours, or used as it is.

    python benchmarks/mutate_checkpoints.py [--mutants 10000] [--first 0]

A run directory in memory holds two checkpoints of a small job. A mutant is the newer one with one
to three changes, whose hashes were computed again, so that they say nothing. Changes are made in
the variables themselves, in the values of the manifest, in its text, and in the bytes of a shard.
Then everything that reads it
is called: a start of the job from the directory, a listing, a verification, a load; and the next
save over it. The start must come to the newer checkpoint with variables of the plan's own types, to
the older one with a report, or to a typed error; nothing may take more memory than goes with the
size of the files. Prints a table and exits with 1 where a mutant is lost.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import struct
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "shared"))

from disks import LogFs

import actorflow as af
from actorflow import nn
from actorflow.checkpoint.errors import CheckpointError
from actorflow.checkpoint.manager import CheckpointManager
from actorflow.options.run_spec import RunSpec
from actorflow.run.restoring import start_from
from compiler.contract.errors import ActorflowError
from compiler.contract.plan import Plan

RUN = Path("/disk/run")
SPARE_BYTES = 4 << 20
"""Memory that reading may take besides some forty times the bytes of the files."""

ABSURD = (
    None, True, False, 0, -1, 1, 2**31, 2**60, 2**62, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, "",
    "..", "../../etc/passwd", "/etc/passwd", "manifest.json", "model-00001.safetensors", "con",
    "x" * 5000, "\ud800", "\0", "é", "0" * 32, "float64", "bfloat16", "object", "step", [], {},
    [[]], [0], [2**61], [-3], [1] * 40, [0] * 33, {"a": 1}, [None], "NaN",
)  # fmt: skip


@dataclass
class Setting:
    """The plan of a small job, its data, a disk with a checkpoint, and the files of a newer one."""

    plan: Plan
    source: Callable[[], Any]
    disk: LogFs
    files: dict[str, bytes]
    groups: dict[str, dict[str, Any]]
    facts: dict[str, Any]


@dataclass
class Verdict:
    """What a mutant came to: "newer", "older", "refused", or "lost" with the reason."""

    kind: str
    reason: str = ""
    changes: list[str] = field(default_factory=list)


def setting() -> Setting:
    """Compile the job and save two steps of it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 2)

        def __call__(self, x: af.Tensor) -> af.Tensor:
            return self.down(af.relu(self.up(x)))

    @af.job(optimizer=af.optim.SGD(0.1, momentum=0.9))
    def train(model: Net, batch: Any) -> af.Tensor:
        return model(batch.x).mean()

    def source() -> af.data.ArraySource:
        return af.data.ArraySource({"x": np.ones((32, 3), np.float32)}, batch=4)

    plan = train.compile(Net(), source(), every=1)
    runner = af.Runner(plan)
    list(runner.stream(source(), steps=1))
    groups: dict[str, dict[str, Any]] = {"model": {}, "optim": {}}
    values = runner.variables()
    for variable in plan.state:
        group = "model" if variable.role == "parameter" else "optim"
        groups[group][variable.name] = values[variable.name]
    facts = {"seed": 0, "plan_hash": plan.graph_hash, "config": dict(plan.options)}
    facts |= {"data_state": source().state(), "data_fingerprint": source().fingerprint()}
    fs = LogFs(RUN.parent)
    with CheckpointManager(RUN, fs=fs) as manager:
        groups["optim"]["step"] = np.array(1)
        manager.save(1, groups, **facts)
        disk = copy.deepcopy(fs)
        groups["optim"]["step"] = np.array(2)
        manager.save(2, groups, **facts)
    disk.kill_processes()
    files = {p.name: data for p, data in fs.files().items() if p.parent.name.endswith("2")}
    return Setting(plan, source, disk, files, groups, facts)


def mutant(own: Setting, random: Random) -> tuple[dict[str, bytes], list[str]]:
    """Return the files of a checkpoint with some changes, signed again, and what was changed."""
    if random.random() < 0.25:
        return _with_other_variables(own, random)
    files, changes = dict(own.files), list[str]()
    body = json.loads(files["manifest.json"].split(b"\n")[0])
    for _ in range(random.choice((1, 1, 2, 3))):
        if random.random() < 0.25:
            changes.append(_change_shard(files, body, random))
        else:
            changes.append(_change_value(body, random))
    text = json.dumps(body).encode()
    if random.random() < 0.15:
        text = _changed_text(text, random)
        changes.append("text")
    files["manifest.json"] = text + b"\n" + xxhash.xxh3_128_hexdigest(text).encode()
    return files, changes


def _with_other_variables(own: Setting, random: Random) -> tuple[dict[str, bytes], list[str]]:
    """Write a checkpoint that is whole, and whose variables are others than the plan's."""
    groups = {group: dict(tensors) for group, tensors in own.groups.items()}
    tensors = groups[random.choice(sorted(groups))]
    name = random.choice(sorted(tensors))
    kind = random.choice(("dropped", "none", "renamed", "added", "reshaped", "retyped", "counted"))
    array = tensors[name]
    if kind == "none":
        groups = {"model": {}, "optim": {}}
    elif kind == "counted":
        groups["optim"]["step"] = np.array(random.choice((0, 1, 3, -1, 2**62)))
    elif kind in ("dropped", "renamed"):
        del tensors[name]
    if kind in ("added", "renamed"):
        tensors[name + random.choice(("", "2", "/", "\n", "x" * 300))] = array
    elif kind == "reshaped":
        shapes = ((), (1,), (0,), (0, 7), (*array.shape, 1), array.shape[::-1])
        tensors[name] = np.zeros(random.choice(shapes), array.dtype)
    elif kind == "retyped":
        tensors[name] = array.astype(random.choice(("float64", "float16", "int32", "uint8")))
    with CheckpointManager(RUN, fs=(fs := LogFs(RUN.parent))) as manager:
        manager.save(2, groups, **own.facts)
    files = {path.name: data for path, data in fs.files().items() if path.name != ".lock"}
    return files, [f"{name} {kind}"]


def _change_value(body: Any, random: Random) -> str:
    """Change one place of the manifest, at any depth; return its path."""
    place, path = body, ""
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return path + " (empty)"
        key = random.choice(keys)
        path += f".{str(key)[:40]}"
        if isinstance(place[key], dict | list) and place[key] and random.random() < 0.8:
            place = place[key]
            continue
        break
    value = place[key]
    kind = random.randrange(6)
    if kind == 0:
        del place[key]
    elif kind == 1 and isinstance(place, list):
        place.insert(random.randrange(len(place) + 1), value)
    elif kind == 1:
        place[random.choice(("", "more", f"{key}2", str(key).upper()))] = value
    elif kind == 2 and type(value) is int:
        place[key] = random.choice((value + 1, value - 1, 2 * value, -value, value << 40))
    elif kind == 2 and isinstance(value, list) and value:
        random.shuffle(value)
    elif kind == 3:
        place[key] = place[random.choice(keys)]
    else:
        place[key] = random.choice(ABSURD)
    return path


def _change_shard(files: dict[str, bytes], body: Any, random: Random) -> str:
    """Change bytes of a shard, and say in the manifest that they were always so."""
    name = random.choice(sorted(set(files) - {"manifest.json"}))
    data = bytearray(files[name])
    if len(data) <= 8:
        return f"{name} (empty)"
    length = min(struct.unpack_from("<Q", data)[0], len(data) - 8)
    where = random.choice(("length", "header", "payload", "cut", "longer"))
    if where == "length":
        struct.pack_into("<Q", data, 0, random.choice((0, 1, length + 8, 2**40, 2**64 - 1)))
    elif where == "header" and length:
        data[random.randrange(8, 8 + length)] ^= 1 << random.randrange(8)
    elif where == "payload" and len(data) > 8 + length:
        data[random.randrange(8 + length, len(data))] ^= 1 << random.randrange(8)
    elif where == "cut":
        del data[random.randrange(len(data)) :]
    else:
        data += bytes(random.choice((1, 8, 4096)))
    files[name] = bytes(data)
    for file in body["files"] if isinstance(body.get("files"), list) else ():
        if isinstance(file, dict) and file.get("name") == name:
            file["xxh3_128"] = xxhash.xxh3_128_hexdigest(bytes(data))
            if random.random() < 0.5:
                file["size_bytes"] = len(data)
    _sign_pieces(body, name, bytes(data), length)
    return f"{name} {where}"


def _sign_pieces(body: Any, name: str, data: bytes, length: int) -> None:
    try:
        header = json.loads(data[8 : 8 + length])
        for piece in body["pieces"]:
            if piece["file"] == name:
                begin, end = header[piece["tensor"]]["data_offsets"]
                part = data[8 + length + begin : 8 + length + end]
                piece["xxh3_128"] = xxhash.xxh3_128_hexdigest(part)
    except (ValueError, LookupError, TypeError, AttributeError):
        pass  # what is changed already need not be signed


def _changed_text(text: bytes, random: Random) -> bytes:
    at = random.randrange(len(text))
    kind = random.randrange(7)
    if kind == 0:
        return text[:at]
    if kind == 1:
        return b"[" * random.choice((70, 5000, 200_000)) + text
    if kind == 2:
        return text[:at] + bytes([random.randrange(256)]) + text[at + 1 :]
    if kind == 3:
        return text.replace(b"null", random.choice((b"NaN", b"Infinity", b"1e999", b"9" * 5000)))
    if kind == 4:
        deep = random.choice((60, 70, 900, 100_000))
        return text.replace(b'"data_state":', b'"data_state":' + b'{"a":' * deep, 1).replace(
            b', "data_fingerprint"', b"}" * deep + b', "data_fingerprint"', 1
        )
    if kind == 5:
        return text.replace(b'"step"', b'"step": 2, "step"', 1)
    return text.decode().encode(random.choice(("utf-16", "utf-8-sig", "utf-32")))


def judged(own: Setting, files: dict[str, bytes]) -> Verdict:
    """Let everything read a mutant and save over it; return what came of it."""
    fs = copy.deepcopy(own.disk)
    reports: list[str] = []
    manager = CheckpointManager(RUN, fs=fs, report=reports.append)
    with manager:
        directory = RUN / "step-0000000002"
        fs.mkdir(directory)
        for name, data in files.items():
            fd = fs.create(directory / name)
            fs.inodes[fs.open_files[fd]].data[:] = data
            fs.close(fd)
        tracemalloc.start()
        try:
            verdict = _started(own, manager, reports)
            for call in (manager.describe, lambda: manager.verify(2), lambda: manager.load(2)):
                try:
                    str(call()).encode(errors="strict")
                except CheckpointError as error:
                    str(error).encode()
            manager.save(2, own.groups, **own.facts)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        manager.verify(2)
        if [message for message in reports if not message.isprintable() and "\n" not in message]:
            return Verdict("lost", f"a report that cannot be printed: {reports!r}")
    if peak_bytes > SPARE_BYTES + 40 * sum(map(len, files.values())):
        return Verdict("lost", f"{peak_bytes:,} bytes of memory")
    return verdict


def _started(own: Setting, manager: CheckpointManager, reports: list[str]) -> Verdict:
    try:
        start = start_from(manager, own.plan, RunSpec(own.source(), steps=2), 0, reports.append)
    except ActorflowError as error:
        str(error).encode()
        return Verdict("refused")
    if start is None or start.step not in (1, 2):
        return Verdict("lost", f"a start from {start}")
    if start.step == 1 and not reports:
        return Verdict("lost", "the older one is used without a word")
    types = {v.name: own.plan.views[v.view].type for v in own.plan.state}
    for name, array in start.values.items():
        type_ = types.get(name)
        if type_ is None or (array.shape, str(array.dtype)) != (type_.shape, type_.dtype.value):
            return Verdict("lost", f"variable {name!r} is {array.dtype}{list(array.shape)}")
    return Verdict("older" if start.step == 1 else "newer")


def tried(own: Setting, index: int) -> Verdict:
    """Make a mutant of a number and judge it; whatever else it raises is a loss."""
    files, changes = mutant(own, Random(index))
    try:
        verdict = judged(own, files)
    except Exception as error:  # what escapes is what is looked for
        verdict = Verdict("lost", f"{type(error).__name__}: {str(error)[:200]}")
    verdict.changes = changes
    return verdict


def main() -> int:
    """Judge all mutants; return 1 where one is lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mutants", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    base, counts, begin = setting(), Counter[str](), time.monotonic()
    for index in range(options.first, options.first + options.mutants):
        verdict = tried(base, index)
        counts[verdict.kind] += 1
        if verdict.kind == "lost":
            print(f"mutant {index} ({', '.join(verdict.changes)}): {verdict.reason}")
    seconds = time.monotonic() - begin
    print("| mutants | newer used | older used | refused | lost | seconds |")
    print("|---|---|---|---|---|---|")
    row = [counts[kind] for kind in ("newer", "older", "refused", "lost")]
    print(f"| {options.mutants:,} | {' | '.join(f'{n:,}' for n in row)} | {math.ceil(seconds)} |")
    return int(counts["lost"] > 0)


if __name__ == "__main__":
    sys.exit(main())
