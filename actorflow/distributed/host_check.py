"""`actorflow launch --check`: do these hosts fit together?

One rank per host looks at its own machine and at its links, all bring what they saw to rank 0 by
the meetings that every job uses, and `findings` judges it: a pure function, so that every cluster
can be tested on one machine. Ranks, and not agents, do this, because what is tried is then what a
job needs: its host's Python, its keys, its way to the coordinator.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from actorflow.distributed.link_probe import (
    LinkFigures,
    LinkListener,
    address_toward,
    pairs_of_rounds,
    probe_link,
)
from actorflow.environment.host import Host, examine, processor
from compiler.contract.codec import from_row, to_row
from memory.report import format_bytes

MOST_ROUNDS = 24
"""Rounds of links, of two directions each: above 25 hosts some links are not tried."""
_MOST_CLOCK_S = 1.0
_LEAST_FREE_BYTES = 1 << 30
_PACKAGES = ("actorflow", "numpy", "pyzmq", "msgpack", "safetensors", "onednn-cpu-gomp", "mpi4py")
_BETWEEN_HOSTS = "mpi4py"
_BITS = "kernels, and so bits, depend on it: a job refuses such hosts without --mixed-hosts"

GatherObjects = Callable[[str, Any], Sequence[Any]]
"""`RankClient.all_gather_object`."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a host says of itself.

    `name` is its host name, `address` that on its way to the coordinator, "" where it has none.
    `packages` are pairs of a distribution and its version, "" where it is not installed.
    `script` is the digest of the user's script, or "" where it cannot be read. `compiler` is "" if
    there is none that builds, and `compiler_problem` says why. `gpus` are the names of its NVIDIA
    cards. `port` is that of its listener of links, 0 where it cannot listen.
    """

    name: str
    address: str
    python: str
    packages: tuple[tuple[str, str], ...]
    processor: str
    num_cores: int
    script: str
    compiler: str
    compiler_problem: str
    gpus: tuple[str, ...]
    port: int


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """What a host found in the run directory: marks of which hosts, or why it cannot be used."""

    seen: tuple[int, ...] = ()
    free_bytes: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class HostReport:
    """All that is known of a host. `directory` is None where no run directory was named."""

    facts: HostFacts
    links: tuple[LinkFigures, ...]
    directory: DirectoryFacts | None


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """One thing that is wrong, and how to mend it. A warning does not fail the check."""

    text: str
    is_warning: bool = False

    def __str__(self) -> str:
        return f"{'warning' if self.is_warning else 'problem'}: {self.text}"


def check_hosts(
    rank: int,
    gather: GatherObjects,
    script: Path,
    directory: Path | None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[HostReport, ...]:
    """Look at this host and at its links, together with all others; return the reports of all.

    Args:
        rank: the number of this host.
        gather: brings a value to a meeting of all hosts, and returns those of all.
        script: the user's script, which must be the same file on all hosts.
        directory: the run directory, which must be one for all hosts, or None.
        environ: the environment of a rank, with MASTER_ADDR and MASTER_PORT.

    Raises PeerFailed where another host does not come.
    """
    address, listener = _address(environ), None
    nonce = bytes(gather("agree on a nonce", os.urandom(32))[0])
    with suppress(OSError):  # facts without a port: no other host can try the link to this one
        listener = LinkListener(address, nonce)
    try:
        # What other processes use is not compared, and takes time to see.
        host = examine(environ, wait=lambda seconds: None)
        own = facts_of(host, script, address, 0 if listener is None else listener.port)
        hosts = [from_row(HostFacts, row) for row in gather("tell facts of hosts", to_row(own))]
        links = _try_links(rank, gather, hosts, nonce)
        found = None if directory is None else _try_directory(rank, gather, directory, nonce)
        report = HostReport(own, links, found)
        return tuple(from_row(HostReport, row) for row in gather("report", to_row(report)))
    finally:
        if listener is not None:
            listener.close()


def _address(environ: Mapping[str, str]) -> str:
    try:
        return address_toward(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]))
    except OSError:
        return ""


def facts_of(host: Host, script: Path, address: str, port: int) -> HostFacts:
    """Return what is compared of a host that was examined."""
    try:
        digest = hashlib.sha256(script.read_bytes()).hexdigest()
    except OSError:
        digest = ""
    is_usable = host.compiler is not None and not host.compiler_error
    return HostFacts(
        name=socket.gethostname(),
        address=address,
        python=".".join(map(str, sys.version_info[:3])),
        packages=tuple((name, _version(name)) for name in _PACKAGES),
        processor=processor(),
        num_cores=host.num_cores,
        script=digest,
        # Without its path, which may differ.
        compiler=str(host.compiler).partition(": ")[2] if is_usable else "",
        compiler_problem="" if is_usable else host.compiler_error or "no cc, gcc or clang",
        gpus=tuple(gpu.name for gpu in host.cuda.gpus),
        port=port,
    )


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _try_links(
    rank: int, gather: GatherObjects, hosts: Sequence[HostFacts], nonce: bytes
) -> tuple[LinkFigures, ...]:
    """Try the links of this host in rounds: first one of a pair connects, then the other."""
    links, is_broken = list[LinkFigures](), 0
    for pairs in pairs_of_rounds(len(hosts), MOST_ROUNDS):
        for direction in (0, 1):
            # A meeting before each: the two hosts of a pair have their link for themselves.
            gather("try links", None)
            for pair in pairs:
                if pair[direction] != rank:
                    continue
                peer = pair[1 - direction]
                if not hosts[peer].port:
                    links.append(LinkFigures(peer, problem="it cannot listen on its address"))
                elif is_broken < 2:  # a host behind a firewall would wait in vain for each other
                    links.append(probe_link(peer, (hosts[peer].address, hosts[peer].port), nonce))
                    is_broken += bool(links[-1].problem)
    return tuple(links)


def _try_directory(
    rank: int, gather: GatherObjects, directory: Path, nonce: bytes
) -> DirectoryFacts:
    """Leave a mark in the run directory, look for those of all others, and take it away again."""
    num_hosts, name = len(gather("mark", None)), f".check-{nonce.hex()[:16]}"
    marks = [directory / f"{name}-{host}" for host in range(num_hosts)]
    problem = ""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        marks[rank].write_bytes(nonce)
    except OSError as error:
        problem = error.strerror or str(error)
    gather("look for marks", None)
    found = DirectoryFacts(problem=problem)
    if not problem:
        seen = tuple(other for other, mark in enumerate(marks) if _holds(mark, nonce))
        found = DirectoryFacts(seen, shutil.disk_usage(directory).free)
    gather("take marks away", None)
    with suppress(OSError):
        marks[rank].unlink()
    return found


def _holds(mark: Path, nonce: bytes) -> bool:
    # The content, not the name alone: on a disk that is full a file can be made, and stays empty.
    try:
        return mark.read_bytes() == nonce
    except OSError:
        return False


def findings(reports: Sequence[HostReport], directory: str = "") -> list[CheckFinding]:
    """Judge what all hosts reported, in the order in which one would mend it.

    `directory` is the run directory, as the user named it.
    """
    hosts = [report.facts for report in reports]
    return [
        *_of_installation(hosts),
        *_of_machines(hosts),
        *_of_links(reports),
        *_of_directory(reports, directory),
    ]


def _of_installation(hosts: Sequence[HostFacts]) -> list[CheckFinding]:
    found = [_differing(hosts, "Python", [host.python for host in hosts])]
    for at, name in enumerate(_PACKAGES):
        versions = [host.packages[at][1] or "not installed" for host in hosts]
        found.append(_differing(hosts, name, versions))
    if len(hosts) > 1 and not any([dict(host.packages)[_BETWEEN_HOSTS] for host in hosts]):
        text = "mpi4py is installed on no host, and tensors between hosts need it; run on each:"
        found.append(CheckFinding(f"{text} python -m pip install 'actorflow[mpi]'"))
    for number, host in enumerate(hosts):
        if not host.script:
            text = f"{_called(number, host)} cannot read the script; put it under the same path"
            found.append(CheckFinding(f"{text} on all hosts"))
    if all([host.script for host in hosts]):
        found.append(_differing(hosts, "the script", [f"SHA-256 {h.script[:12]}" for h in hosts]))
    for number, host in enumerate(hosts):
        if host.compiler_problem:
            text = f"{_called(number, host)} has no C compiler that builds: {host.compiler_problem}"
            found.append(CheckFinding(f"{text}; install gcc there, or name one by CC"))
    return [finding for finding in found if finding is not None]


def _of_machines(hosts: Sequence[HostFacts]) -> list[CheckFinding]:
    compared = (
        ("the processor", [host.processor for host in hosts], _BITS),
        ("the C compiler", [host.compiler for host in hosts], _BITS),
        ("the kind of GPUs", [_gpus(host) for host in hosts], "the bits of a run depend on it"),
        (
            "the number of cores",
            [str(host.num_cores) for host in hosts],
            "ranks of all hosts have as many threads as the least of these allows",
        ),
    )
    found = [_differing(hosts, what, values, mend) for what, values, mend in compared]
    return [finding for finding in found if finding is not None]


def _differing(
    hosts: Sequence[HostFacts], what: str, values: Sequence[str], warning: str = ""
) -> CheckFinding | None:
    """Return that a value differs, by the first host and the first that has another one.

    With `warning`, which says what follows from it, it is no problem.
    """
    other = next((n for n, value in enumerate(values) if value != values[0]), None)
    if other is None:
        return None
    first, second = _called(0, hosts[0]), _called(other, hosts[other])
    text = f"{what} differs: {values[0] or 'none'} on {first}, {values[other] or 'none'} on"
    mend = warning or "make it the same on all hosts"
    return CheckFinding(f"{text} {second}; {mend}", is_warning=bool(warning))


def _of_links(reports: Sequence[HostReport]) -> list[CheckFinding]:
    found = list[CheckFinding]()
    for number, report in enumerate(reports):
        host = _called(number, report.facts)
        for link in report.links:
            peer = _called(link.peer, reports[link.peer].facts)
            if link.problem:
                text = f"{host} does not reach {peer} at {link.problem}"
                mend = "open all TCP ports between the hosts (firewall, security group)"
                found.append(CheckFinding(f"{text}; {mend}"))
            elif abs(link.clock_ahead_s) > _MOST_CLOCK_S and number < link.peer:
                text = f"the clock of {peer} is {link.clock_ahead_s:+.1f} s from that of {host}"
                mend = "times in logs do not compare; set both by NTP"
                found.append(CheckFinding(f"{text}: {mend}", is_warning=True))
    return found


def _of_directory(reports: Sequence[HostReport], directory: str) -> list[CheckFinding]:
    found = list[CheckFinding]()
    for number, report in enumerate(reports):
        facts = report.directory
        if facts is None:
            continue
        host = _called(number, report.facts)
        if facts.problem:
            text = f"{host} cannot write the run directory {directory}: {facts.problem}"
            found.append(CheckFinding(text))
            continue
        wrote = [n for n, r in enumerate(reports) if r.directory and not r.directory.problem]
        if missing := [n for n in wrote if n not in facts.seen]:
            other = _called(missing[0], reports[missing[0]].facts)
            text = f"the run directory {directory} of {host} is not that of {other}"
            found.append(CheckFinding(f"{text}; name one that all hosts share, such as NFS"))
        if facts.free_bytes < _LEAST_FREE_BYTES:
            text = f"the run directory {directory} of {host} has {format_bytes(facts.free_bytes)}"
            found.append(CheckFinding(f"{text} left", is_warning=True))
    return found


def check_table(reports: Sequence[HostReport]) -> list[str]:
    """Return the lines of a table: a row for each host."""
    rows = [("host", "name", "address", "cores", "python", "C compiler", "GPUs", "links")]
    for number, report in enumerate(reports):
        facts = report.facts
        rows.append((
            str(number), facts.name, facts.address or "none", str(facts.num_cores), facts.python,
            facts.compiler or "none", _gpus(facts) or "none", _links(report),
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=True)]).rstrip()
        for row in rows
    ]


def _links(report: HostReport) -> str:
    """Return the worst of a host's links."""
    tried = [link for link in report.links if not link.problem]
    if not tried:
        return f"none of {len(report.links)}"
    latency_us = max([link.round_trip_us for link in tried])
    rate = min([link.mb_per_s for link in tried])
    return f"{len(tried)} of {len(report.links)}: <= {latency_us:,.0f} us, >= {rate:,.0f} MB/s"


def _gpus(host: HostFacts) -> str:
    names = sorted({*host.gpus})
    return ", ".join([f"{host.gpus.count(name)} {name}" for name in names])


def _called(number: int, host: HostFacts) -> str:
    return f"host {number} ({host.name})"
