"""Options of `actorflow simulate`: what joins the ranks, and how their speeds differ."""

from __future__ import annotations

import argparse
import math

from actors.network import ALGORITHMS, Network, Wire
from actors.ranks import Spread
from compiler.errors import CompileError
from compiler.mesh import Mesh, MeshLink, Ranks, joined


def add_network_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    add = parser.add_argument
    add("--devices", type=int, metavar="N", help="ranks (default: as many as the plan is for)")
    add("--link", type=float, default=12.5, metavar="GB/s",
        help="of each host each way, shared by its ranks (default 12.5)")  # fmt: skip
    add("--latency", type=float, default=5.0, metavar="US",
        help="per message between hosts (default 5)")  # fmt: skip
    add("--per-host", type=int, default=1, metavar="K", help="ranks of a host (default 1)")
    add("--inside", type=float, default=50.0, metavar="GB/s",
        help="of each rank to the others of its host (default 50)")  # fmt: skip
    add("--inside-latency", type=float, default=1.0, metavar="US",
        help="per message inside a host (default 1)")  # fmt: skip
    add("--per-rack", type=int, default=0, metavar="H",
        help="hosts of a rack (default: all hosts at one switch)")  # fmt: skip
    add("--uplink", type=float, metavar="GB/s",
        help="of each rack each way, shared by its hosts (default: as --link)")  # fmt: skip
    add("--algorithm", choices=ALGORITHMS, default=ALGORITHMS[0], help="of the all-reduce")
    add("--straggler", type=float, default=1.0, metavar="F", help="one rank is F times as slow")
    add("--spread", type=float, default=0.0, metavar="S",
        help="ranks are exp(S x) times as slow, x normal for each rank (default 0: all alike)",
        )  # fmt: skip


def ranks_of(options: argparse.Namespace) -> Ranks:
    """Return the ranks that a plan is asked for, and the links that its buckets are cut for."""
    link = MeshLink(options.link, options.latency * 1e3)
    return joined(Mesh(("data",), (options.devices or 1,)), link)


def spread_of(options: argparse.Namespace) -> Spread:
    """Return how the speeds of the ranks differ."""
    return Spread(options.straggler, options.spread)


def network_of(options: argparse.Namespace, num_ranks: int) -> Network:
    """Return what joins the ranks. Raises CompileError where the algorithm cannot run there."""
    link, inside = options.latency * 1e3, options.inside_latency * 1e3
    if options.algorithm == "hierarchical" and num_ranks % options.per_host:
        raise CompileError(
            f"--algorithm hierarchical needs full hosts, and {num_ranks} devices do not fill hosts"
            f" of {options.per_host}; choose --devices or --per-host, or another algorithm"
        )
    return Network(
        Wire(options.link, link),
        options.algorithm,
        options.per_host,
        Wire(options.inside, inside),
        options.per_rack,
        Wire(options.uplink or options.link, link),
    )


def check_network(options: argparse.Namespace) -> None:
    """Raise CompileError for numbers that no network has."""
    devices = 1 if options.devices is None else options.devices
    uplink = options.link if options.uplink is None else options.uplink
    speeds = (("--link", options.link), ("--inside", options.inside), ("--uplink", uplink))
    times = (("--latency", options.latency), ("--inside-latency", options.inside_latency))
    expected = (
        ("--devices", devices, "1 or more", devices >= 1),
        *[(name, v, "more than 0 GB/s", 0 < v < math.inf) for name, v in speeds],
        *[(name, v, "0 us or more", 0 <= v < math.inf) for name, v in times],
        ("--per-host", options.per_host, "1 or more", options.per_host >= 1),
        ("--per-rack", options.per_rack, "0 or more", options.per_rack >= 0),
        ("--straggler", options.straggler, "1 or more", 1 <= options.straggler < math.inf),
        ("--spread", options.spread, "0 or more", 0 <= options.spread < math.inf),
    )
    for name, value, wanted, is_good in expected:
        if not is_good:
            raise CompileError(f"{name} must be {wanted}, got {value}")
    if options.uplink is not None and not options.per_rack:
        raise CompileError(
            f"--uplink {options.uplink:g} is that of racks, and there are none; say how many hosts"
            " a rack has by --per-rack"
        )
