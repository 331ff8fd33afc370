"""One job on several hosts: each is a process of the command on this machine, with its index."""

import os
import re
import signal
import socket
from contextlib import closing

import pytest
from launching import end_of, host_launcher
from namespaces import two_namespaces
from process_ends import are_gone, tells_of
from stalling_proxy import StallingProxy

SCRIPT = """
import os, signal, sys, threading
from actorflow.distributed.member import current_rank

member = current_rank()
names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR", "ACTORFLOW_THREADS")
own = (member.rank, member.host.split()[0], *[os.environ[n] for n in names])
rows = member.all_gather_object("rows", own)
if member.rank == 0:
    for row in rows:
        print(*row)
with open(os.environ["TELLS"], "a") as file:
    file.write(f"{member.rank} {os.getpid()} {os.getppid()}\\n")
if "wait" in sys.argv:
    member.all_gather_object("go on", 0) if member.rank else threading.Event().wait()
if "gone" in sys.argv:
    with open(os.environ["GO"] + str(member.rank)) as file:
        file.read()
"""


@pytest.fixture
def hosts(tmp_path):
    """Return a function that starts the launcher process of a host."""
    with host_launcher(tmp_path) as start:
        yield start


@pytest.fixture
def tells(tmp_path):
    """Return a function that returns the process and the parent of each of so many ranks."""
    with tells_of(tmp_path / "tells") as lines:

        def processes(count):
            rows = [[int(word) for word in line.split()] for line in lines(count)]
            return {rank: (process, parent) for rank, process, parent in rows}

        yield processes


def at(proxy):
    """Return the option that names a proxy in place of the launcher."""
    return {"--coordinator": f"127.0.0.1:{proxy.port}"}


def started(hosts, *arguments, **options):
    """Start two hosts, the launcher last; return both, host 0 first."""
    second = hosts(1, SCRIPT, *arguments, **options)
    return hosts(0, SCRIPT, *arguments, **options), second


@pytest.mark.slow
def test_hosts_meet_at_an_address_of_ipv6(hosts):
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
            port = free.getsockname()[1]
    except OSError:
        pytest.skip("this machine has no IPv6")
    first, _ = started(hosts, options={"--coordinator": f"[::1]:{port}"})
    code, out, _ = end_of(first)
    assert code == 0
    assert [line.split()[5] for line in out.splitlines()] == ["::1", "::1"]


def test_ranks_of_two_hosts_meet_and_know_their_places(hosts, tells):
    first, second = started(hosts, n=3)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    said = [
        f"0 0 0 2 3 127.0.0.1 {threads}",
        f"1 0 1 2 3 127.0.0.1 {threads}",
        f"2 1 0 1 3 127.0.0.1 {threads}",
    ]
    assert end_of(first) == (0, "\n".join(said) + "\n", "")
    assert end_of(second) == (0, "", "")
    parents = {rank: parent for rank, (_, parent) in tells(3).items()}
    assert parents == {0: first.pid, 1: first.pid, 2: second.pid}


def test_a_rank_that_is_killed_on_another_host_is_named_with_it(hosts, tells):
    first, second = started(hosts, "wait")
    process = tells(2)[1][0]
    second.send_signal(signal.SIGSTOP)  # an agent that is stopped for a while costs nothing
    os.kill(process, signal.SIGKILL)
    second.send_signal(signal.SIGCONT)
    code, _, err = end_of(first)
    assert code == 128 + signal.SIGKILL
    assert err.startswith("actorflow launch: rank 1 on host 1 (")
    assert err.endswith(") was ended by SIGKILL\n")
    assert end_of(second) == (128 + signal.SIGKILL, "", "")


def test_a_host_whose_agent_is_killed_is_lost_at_once(hosts, tells):
    first, second = started(hosts, "wait", options={"--host-timeout": 10_000})
    process = tells(2)[1][0]
    second.kill()
    code, _, err = end_of(first)
    assert (code, err.count("\n")) == (1, 1)
    assert "rank 1 on host 1 (" in err
    assert err.endswith(") is lost: its host was lost: its agent has ended\n")
    assert are_gone([process])


def test_agents_end_their_ranks_when_the_launcher_is_killed(hosts, tells):
    first, second = started(hosts, "wait", options={"--host-timeout": 10_000})
    processes = [process for process, _ in tells(2).values()]
    first.kill()
    code, out, err = end_of(second)
    assert (code, out) == (1, "")
    assert err == (
        f"actorflow launch: host 1 of 2: the launcher at tcp://127.0.0.1:{hosts.port} closed the"
        " connection; the ranks here are ended\n"
    )
    assert are_gone(processes)


LINKS = """
import os, sys
from actorflow.distributed.member import current_rank

member = current_rank()
links = member.all_gather_object("links", os.environ["ACTORFLOW_LINK"])
if member.rank == 0:
    print(member.epoch, *links, flush=True)
member.all_gather_object("printed", 0)
if member.epoch == 1 and member.rank == 1:
    sys.exit(3)
"""


def test_a_link_that_is_not_stated_is_measured_once_and_told_to_all_ranks(hosts, tmp_path):
    environ = {"ACTORFLOW_LINK": "", "ACTORFLOW_CACHE": str(tmp_path / "cache")}
    options = {"--restarts": 1}
    second = hosts(1, LINKS, options=options, **environ)
    first = hosts(0, LINKS, options=options, **environ)
    code, out, err = end_of(first)
    assert (code, end_of(second)[0]) == (0, 0), err
    (kept,) = (tmp_path / "cache" / "links").iterdir()
    link = kept.read_text()
    assert out == f"1 {link} {link}\n2 {link} {link}\n"
    said = f"actorflow launch: the link between hosts was measured: ACTORFLOW_LINK={link} (GB/s:us)"
    assert err.splitlines()[0] == f"{said}; kept in {kept}"
    assert err.count("the link between hosts") == 1


ONCE = SCRIPT.replace('if "wait" in sys.argv:', 'if os.environ["ACTORFLOW_EPOCH"] == "1":')
"""Waits in the first epoch, and ends well in the next."""

STARTED_TWICE = "actorflow launch: the job has ended; its ranks were started 2 times\n"


def test_the_ranks_of_all_hosts_are_started_again_when_one_is_killed(hosts, tells):
    again = {"--restarts": 3}.items()
    second = hosts(1, ONCE, options=again)
    first = hosts(0, ONCE, options=again)
    os.kill(tells(2)[1][0], signal.SIGKILL)
    code, _, err = end_of(first)
    assert code == 0
    assert ") was ended by SIGKILL\nactorflow launch: restart 1 of 3; " in err
    assert err.endswith(STARTED_TWICE)
    assert end_of(second) == (0, "", "")
    assert {parent for _, parent in tells(4).values()} == {first.pid, second.pid}


def test_a_host_that_was_lost_and_comes_again_has_part_in_the_next_epoch(hosts, tells):
    again = {"--restarts": 3, "--host-timeout": 10_000}.items()
    second = hosts(1, ONCE, options=again)
    first = hosts(0, ONCE, options=again)
    tells(2)
    second.kill()
    second = hosts(1, ONCE, options=again)
    code, _, err = end_of(first)
    assert code == 0
    assert ") is lost: its host was lost: its agent has ended\nactorflow launch: restart 1" in err
    assert err.endswith(STARTED_TWICE)
    assert end_of(second) == (0, "", "")


@pytest.mark.slow
def test_a_job_starts_with_the_hosts_that_came_and_goes_on_with_those_that_are_left(hosts, tells):
    """Three hosts at most. Host 1 comes late, and is there when host 2 is lost."""
    some = {"--hosts": "2:3", "--restarts": 3, "--host-grace": 1}.items()
    third = hosts(2, ONCE, n=3, options=some)
    first = hosts(0, ONCE, n=3, options=some)
    tells(2)
    late = hosts(1, ONCE, n=3, options=some)
    lines = [first.stderr.readline() for _ in range(2)]
    assert lines[0].endswith(
        " each on 2 of 3 hosts; one that comes later has part from the next restart on\n"
    )
    assert re.fullmatch(r"actorflow launch: host 1 \(.*\) came; it has part .*\n", lines[1])
    third.kill()
    code, _, err = end_of(first)
    assert code == 0
    assert "rank 1 on host 2 (" in err
    assert err.endswith(STARTED_TWICE)
    assert end_of(late) == (0, "", "")
    parents = [parent for rank, (_, parent) in tells(4).items() if rank == 1]
    assert parents == [late.pid]


def test_a_signal_to_one_agent_stops_the_ranks_of_all_hosts(hosts, tells):
    first, second = started(hosts, "wait")
    tells(2)
    second.send_signal(signal.SIGTERM)
    assert end_of(first)[0] == 128 + signal.SIGTERM
    assert end_of(second) == (128 + signal.SIGTERM, "", "")


def test_a_link_that_stands_still_for_a_while_costs_nothing(hosts, tells, tmp_path):
    pipes = [tmp_path / f"go{rank}" for rank in (0, 1)]
    for pipe in pipes:
        os.mkfifo(pipe)
    go = {"GO": str(tmp_path / "go")}
    long = {"--host-timeout": 10_000}
    with closing(StallingProxy(hosts.port)) as link:
        second = hosts(1, SCRIPT, "gone", options={**long, **at(link)}, **go)
        first = hosts(0, SCRIPT, "gone", options=long, **go)
        processes = [process for process, _ in tells(2).values()]
        link.stall()
        for pipe in pipes:
            pipe.write_text("on")
        assert are_gone(processes)
        link.go_on()
        assert end_of(first)[0] == 0
        assert end_of(second)[0] == 0


def test_a_host_whose_link_stands_still_for_long_is_lost_on_both_sides(hosts, tells):
    short = {"--host-timeout": 3}
    with closing(StallingProxy(hosts.port)) as link:
        second = hosts(1, SCRIPT, "wait", options={**short, **at(link)})
        first = hosts(0, SCRIPT, "wait", options=short)
        processes = [process for process, _ in tells(2).values()]
        link.stall()
        code, _, err = end_of(first)
        assert code == 1
        assert "its agent has been silent for 3 s (--host-timeout)" in err
        assert end_of(second)[0] == 1
        assert are_gone(processes)


def test_hosts_with_different_scripts_are_refused_by_name(hosts):
    second = hosts(1, SCRIPT + "# another one", name="other.py")
    code, _, err = end_of(hosts(0, SCRIPT))
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("actorflow: host 1 (")
    assert ") has another script, of SHA-256 " in err
    assert err.endswith(": give all hosts the same script\n")
    code, _, told = end_of(second)
    assert (code, told) == (1, f"actorflow launch: host 1 of 2: {err.removeprefix('actorflow: ')}")


def test_hosts_that_do_not_come_are_named_on_both_sides(hosts):
    first = hosts(0, SCRIPT, ACTORFLOW_RANK_SECONDS="1")
    assert end_of(first) == (
        1,
        "",
        "actorflow: host 1 of 2 did not connect to the launcher at"
        f" tcp://127.0.0.1:{hosts.port} within 1 s (ACTORFLOW_RANK_SECONDS)\n",
    )
    code, _, err = end_of(hosts(1, SCRIPT, ACTORFLOW_RANK_SECONDS="1"))
    assert code == 1
    assert "could not be reached within 1 s" in err


def test_a_host_with_another_secret_hears_so(hosts, tmp_path):
    hosts(0, SCRIPT)
    other = tmp_path / "other-key"
    other.touch(mode=0o600)
    other.write_text("a5" * 32 + "\n")
    code, _, err = end_of(hosts(1, SCRIPT, options={"--key-file": other}))
    assert code == 1
    assert "the key files of both hosts hold different secrets" in err


def test_a_port_that_is_taken_is_named(hosts):
    with closing(StallingProxy(1)) as other:
        code, _, err = end_of(hosts(0, SCRIPT, options=at(other)))
    assert code == 1
    assert err.startswith(
        f"actorflow: the launcher cannot listen to agents at 127.0.0.1:{other.port}: Address"
    )


def test_two_processes_that_take_themselves_for_one_host_are_told(hosts, tells):
    second = hosts(1, SCRIPT, "wait")
    hosts(0, SCRIPT, "wait")
    tells(2)
    code, _, err = end_of(hosts(1, SCRIPT, "wait"))
    assert code == 1
    assert "another process is host 1 of this job already" in err
    assert second.poll() is None


@pytest.fixture
def linked():
    """Two network namespaces, each one a host; skipped where none can be made."""
    with two_namespaces() as pair:
        yield pair


def started_in(linked, hosts, timeout_s):
    """Start a host in each of two network namespaces; return both, host 0 first."""
    options = {"--coordinator": f"{linked.address}:29400", "--host-timeout": timeout_s}
    second = hosts(1, SCRIPT, "wait", inside=linked.inside(1), options=options)
    return hosts(0, SCRIPT, "wait", inside=linked.inside(0), options=options), second


def test_a_link_that_is_down_for_a_while_costs_nothing(hosts, tells, linked):
    first, second = started_in(linked, hosts, 10_000)
    process = tells(2)[1][0]
    linked.set_link("down")
    os.kill(process, signal.SIGKILL)
    linked.set_link("up")
    code, _, err = end_of(first)
    assert code == 128 + signal.SIGKILL
    assert err.endswith(") was ended by SIGKILL\n")
    assert end_of(second)[0] == 128 + signal.SIGKILL


def test_a_host_whose_link_is_down_is_lost_on_both_sides(hosts, tells, linked):
    first, second = started_in(linked, hosts, 3)
    processes = [process for process, _ in tells(2).values()]
    linked.set_link("down")
    code, _, err = end_of(first)
    assert code == 1
    assert "rank 1 on host 1 (" in err
    assert err.endswith("its agent has been silent for 3 s (--host-timeout)\n")
    code, _, err = end_of(second)
    assert code == 1
    assert err.endswith("has been silent for 3 s (--host-timeout); the ranks here are ended\n")
    assert are_gone(processes)
