"""The check of hosts: what is a problem, what a warning, and how a cluster looks at itself."""

import os
from dataclasses import replace

import pytest

from actorflow.distributed.host_check import (
    DirectoryFacts,
    HostFacts,
    HostReport,
    check_hosts,
    check_table,
    findings,
)
from actorflow.distributed.link_probe import LinkFigures

A = HostFacts(
    name="nodeA",
    address="10.0.0.1",
    python="3.11.7",
    packages=(("actorflow", "0.2.0"), ("numpy", "2.4.6"), ("pyzmq", "27.3.0"), ("msgpack", "1.2.4"),
              ("safetensors", "0.6.2"), ("onednn-cpu-gomp", "2025.2"), ("mpi4py", "4.1.2")),
    processor="Xeon",
    num_cores=8,
    script="5" * 64,
    compiler="gcc 12.2.0",
    compiler_problem="",
    gpus=(),
    port=40113,
)  # fmt: skip
B = replace(A, name="nodeB", address="10.0.0.2")
LINKS = (LinkFigures(1, 210.0, 940.0, 0.001),), (LinkFigures(0, 190.0, 930.0, -0.001),)


def with_package(facts, name, version):
    packages = tuple((n, version if n == name else v) for n, v in facts.packages)
    return replace(facts, packages=packages)


def judged(a=A, b=B, links=LINKS, directories=(None, None), path=""):
    reports = [HostReport(a, links[0], directories[0]), HostReport(b, links[1], directories[1])]
    return [str(finding) for finding in findings(reports, path)]


def test_equal_hosts_with_good_links_are_ready():
    shared = DirectoryFacts((0, 1), 1 << 40)
    assert judged(directories=(shared, shared), path="/runs/a") == []


MPI = (
    "problem: mpi4py is installed on no host, and tensors between hosts need it; run on each:"
    " python -m pip install 'actorflow[mpi]'"
)
BITS = "kernels, and so bits, depend on it: a job refuses such hosts without --mixed-hosts"
ON_B = "on host 0 (nodeA), {} on host 1 (nodeB)"


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (
            {"b": with_package(B, "numpy", "2.3.0")},
            [f"problem: numpy differs: 2.4.6 {ON_B.format('2.3.0')}; make it the same on all"
             " hosts"],
        ),
        (
            {"b": with_package(B, "mpi4py", "")},
            [f"problem: mpi4py differs: 4.1.2 {ON_B.format('not installed')}; make it the same on"
             " all hosts"],
        ),
        ({"a": with_package(A, "mpi4py", ""), "b": with_package(B, "mpi4py", "")}, [MPI]),
        (
            {"b": replace(B, python="3.12.1")},
            [f"problem: Python differs: 3.11.7 {ON_B.format('3.12.1')}; make it the same on all"
             " hosts"],
        ),
        (
            {"b": replace(B, script="6" * 64)},
            [f"problem: the script differs: SHA-256 {'5' * 12} {ON_B.format('SHA-256 ' + '6' * 12)}"
             "; make it the same on all hosts"],
        ),
        (
            {"b": replace(B, script="")},
            ["problem: host 1 (nodeB) cannot read the script; put it under the same path on all"
             " hosts"],
        ),
        (
            {"b": replace(B, compiler="", compiler_problem="no cc, gcc or clang")},
            ["problem: host 1 (nodeB) has no C compiler that builds: no cc, gcc or clang; install"
             " gcc there, or name one by CC",
             f"warning: the C compiler differs: gcc 12.2.0 {ON_B.format('none')}; {BITS}"],
        ),
        (
            {"b": replace(B, processor="EPYC", num_cores=4, gpus=("H100", "H100"))},
            [f"warning: the processor differs: Xeon {ON_B.format('EPYC')}; {BITS}",
             f"warning: the kind of GPUs differs: none {ON_B.format('2 H100')}; the bits of a run"
             " depend on it",
             f"warning: the number of cores differs: 8 {ON_B.format('4')}; ranks of all hosts have"
             " as many threads as the least of these allows"],
        ),
    ],
)  # fmt: skip
def test_hosts_that_differ_are_named_with_both_values(hosts, expected):
    assert judged(**hosts) == expected


def test_a_link_that_is_closed_is_a_problem_of_its_direction():
    closed = LinkFigures(0, problem="10.0.0.1, port 40113: no answer")
    assert judged(links=(LINKS[0], (closed,))) == [
        "problem: host 1 (nodeB) does not reach host 0 (nodeA) at 10.0.0.1, port 40113: no answer;"
        " open all TCP ports between the hosts (firewall, security group)"
    ]


def test_clocks_hours_apart_are_a_warning_that_is_said_once():
    ahead = (LinkFigures(1, 210.0, 940.0, 7200.0),), (LinkFigures(0, 190.0, 930.0, -7200.0),)
    assert judged(links=ahead) == [
        "warning: the clock of host 1 (nodeB) is +7200.0 s from that of host 0 (nodeA): times in"
        " logs do not compare; set both by NTP"
    ]


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (
            DirectoryFacts((1,), 1 << 40),
            "problem: the run directory /runs/a of host 1 (nodeB) is not that of host 0 (nodeA);"
            " name one that all hosts share, such as NFS",
        ),
        (
            DirectoryFacts(problem="Read-only file system"),
            "problem: host 1 (nodeB) cannot write the run directory /runs/a: Read-only file system",
        ),
        (
            DirectoryFacts((0, 1), 300 << 20),
            "warning: the run directory /runs/a of host 1 (nodeB) has 300.0 MiB left",
        ),
    ],
)
def test_a_run_directory_is_shared_writable_and_not_full(second, expected):
    first = DirectoryFacts((0, 1), 1 << 40)
    assert judged(directories=(first, second), path="/runs/a") == [expected]


def test_the_table_has_a_row_for_each_host_with_its_worst_link():
    silent = LinkFigures(0, problem="10.0.0.1, port 40113: no answer")
    reports = [HostReport(A, LINKS[0], None), HostReport(B, (silent,), None)]
    assert check_table(reports) == [
        "host  name   address   cores  python  C compiler  GPUs  links",
        "0     nodeA  10.0.0.1  8      3.11.7  gcc 12.2.0  none  1 of 1: <= 210 us, >= 940 MB/s",
        "1     nodeB  10.0.0.2  8      3.11.7  gcc 12.2.0  none  none of 1",
    ]


@pytest.mark.parametrize("is_shared", [True, False])
def test_hosts_look_at_each_other_and_leave_no_mark(members, at_once, tmp_path, is_shared):
    script = tmp_path / "s.py"
    script.write_text("print(1)\n")
    folders = [tmp_path / "runs", tmp_path / ("runs" if is_shared else "others")]
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}

    def check(member, folder):
        return lambda: check_hosts(member.rank, member.all_gather_object, script, folder, environ)

    _, ranks = members(2)
    first, second = at_once(*[check(*pair) for pair in zip(ranks, folders, strict=True)])
    assert first == second
    assert [[link.problem for link in report.links] for report in first] == [[""], [""]]
    assert [r.directory.seen for r in first] == ([(0, 1)] * 2 if is_shared else [(0,), (1,)])
    assert [list(folder.iterdir()) for folder in folders] == [[], []]
    problems = [f.text for f in findings(first, "runs") if "run directory" in f.text]
    assert len(problems) == (0 if is_shared else 2)
