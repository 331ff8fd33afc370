"""Ray as the way to hosts: what is refused before anything starts, and jobs on a cluster of two."""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import zmq
from error_texts import raises
from launching import end_of

from actorflow.distributed.agent import start_agent
from actorflow.distributed.agent_messages import HostLimits
from actorflow.distributed.hosts import AgentServer, HostAgents
from actorflow.distributed.launcher import RankLaunch
from actorflow.distributed.ray_hosts import (
    HostActor,
    RayHosts,
    check_answer,
    check_token,
    launch_by_ray,
)
from compiler.contract.errors import ActorflowError

ASKED = RankLaunch(("script.py",), 2, 60.0, 1.0)


@pytest.mark.parametrize(
    "environ",
    [{}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/none"}],
    ids=["no_mode", "disabled", "no_token"],
)
def test_a_ray_without_a_token_is_refused(environ):
    with raises(ActorflowError):
        check_token(environ)


def test_a_token_may_be_in_a_file(tmp_path):
    file = tmp_path / "token"
    file.write_text("secret")
    check_token({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)})
    check_token({"RAY_AUTH_MODE": "TOKEN", "RAY_AUTH_TOKEN": "secret"})


def answering(code, stderr):
    return lambda command, **_: subprocess.CompletedProcess(command, code, "", stderr)


def silent(command, timeout, **_):
    raise subprocess.TimeoutExpired(command, timeout)


@pytest.mark.parametrize(
    "ask",
    [
        silent,
        answering(1, "Traceback\nray.exceptions.AuthenticationError: InvalidAuthToken: missing\n"),
        answering(1, "Traceback\nRuntimeError: Version mismatch: 2.60.0 there, 2.52.0 here\n"),
        answering(1, ""),
    ],
    ids=["silent", "token", "version", "nothing"],
)
def test_a_ray_that_does_not_take_us_is_refused_with_the_reason(ask):
    with raises(ActorflowError):
        check_answer("10.0.0.1:6379", ask)


def test_an_answer_is_all_that_is_asked_for():
    check_answer("10.0.0.1:6379", answering(0, "a warning of Ray's"))


@pytest.mark.parametrize(
    ("address", "num_hosts"), [("local", 2), ("ray://head:10001", 2), ("head:6379", 2)]
)
def test_what_cannot_work_is_refused_before_anything_starts(address, num_hosts):
    with raises(ActorflowError):
        launch_by_ray(ASKED, {}, address, num_hosts, HostLimits(60.0, 15.0))


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "secret"}
    with raises(ActorflowError):
        launch_by_ray(ASKED, environ, "head:6379", 2, HostLimits(60.0, 15.0))


def test_a_host_that_cannot_come_ends_the_launch_before_its_time():
    server = AgentServer(2, b"s" * 32, ("127.0.0.1", 0), HostLimits(600.0, 15.0))
    reasons = iter([{}, {}, {1: "host 1 of 2: its agent has ended"}])
    agents = HostAgents(zmq.Poller(), None, server, lambda: next(reasons))
    try:
        with raises(ActorflowError):
            agents.gather()
    finally:
        agents.close(1)


def test_a_folder_that_a_host_lacks_is_named(tmp_path):
    absent, before = tmp_path / "absent", os.getcwd()
    actor = HostActor(b"", (), str(absent))
    assert actor.problem() == f"No such file or directory: {absent}"
    assert [actor.read_output() for _ in range(3)][-1] == (b"", b"", True)
    assert os.getcwd() == before


def test_a_signal_to_the_group_of_an_actor_does_not_reach_its_agent():
    """Ray sends one when an actor was killed, and it would stop the job."""
    server = AgentServer(1, b"s" * 32, ("127.0.0.1", 0), HostLimits(600.0, 15.0))
    agent = start_agent(server.keys(0, ("x.py",)), os.environ)
    try:
        assert os.getpgid(agent.pid) == agent.pid != os.getpgid(0)
    finally:
        agent.kill()
        agent.wait()
        server.close()


class FakeRay(ModuleType):
    """A Ray of hosts on which actors never start; it notes how many bundles are asked for."""

    def __init__(self, alive, free):
        super().__init__("ray")
        self.asked, self.over = [], threading.Event()
        self.exceptions = SimpleNamespace(GetTimeoutError=TimeoutError, RayError=ConnectionError)
        self.util = SimpleNamespace(remove_placement_group=lambda group: None)
        self.nodes = lambda: [{"Alive": True, "Resources": {"CPU": 1}}] * alive
        self.kill = lambda actor: None
        place = ModuleType("ray.util.placement_group")
        place.placement_group = lambda bundles, strategy: SimpleNamespace(
            wait=lambda seconds: self.asked.append(len(bundles)) or len(bundles) <= free
        )
        strategies = ModuleType("ray.util.scheduling_strategies")
        strategies.PlacementGroupSchedulingStrategy = lambda group, **bundle: bundle
        self.modules = {"ray": self, place.__name__: place, strategies.__name__: strategies}

    def remote(self, made):
        actor = SimpleNamespace(problem=SimpleNamespace(remote=lambda: None))
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: actor))

    def get(self, asked, timeout):
        self.over.wait()
        raise self.exceptions.GetTimeoutError


def hosts_of(ray, monkeypatch, *arguments):
    for name, module in ray.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return RayHosts(*arguments, {})


def test_as_many_hosts_are_taken_as_ray_has_room_on(monkeypatch):
    limits = HostLimits(2.0, 15.0, least_hosts=2, grace_s=0.0)
    ray = FakeRay(alive=4, free=3)
    assert hosts_of(ray, monkeypatch, 5, limits).num_hosts == 3
    assert ray.asked == [4, 3]
    with raises(ActorflowError):
        hosts_of(FakeRay(alive=4, free=1), monkeypatch, 5, limits)
    with raises(ActorflowError):
        hosts_of(FakeRay(alive=1, free=1), monkeypatch, 5, limits)


def test_an_agent_that_ray_starts_is_not_waited_for_and_one_that_does_not_come_is_told(monkeypatch):
    """The agents of other hosts would take a launcher that waits for lost."""
    ray = FakeRay(alive=1, free=1)
    hosts = hosts_of(ray, monkeypatch, 1, HostLimits(2.0, 15.0))
    server = AgentServer(1, b"s" * 32, ("127.0.0.1", 0), HostLimits(600.0, 15.0))
    hosts.start({0: server.keys(0, ("x.py",))})
    assert hosts.absent() == {}
    ray.over.set()
    hosts.close()
    server.close()
    text = "host 0 of 1 cannot come: Ray has started no actor there within 60 s"
    assert hosts.absent() == {0: text}


CLUSTER = """
import sys
from ray.cluster_utils import Cluster

# Of 127.0.0.1 Ray makes the machine's own address, and then waits for minutes.
node = {"num_cpus": 1, "object_store_memory": 80 << 20}
head = {**node, "include_dashboard": False, "node_ip_address": "127.0.0.2"}
cluster = Cluster(initialize_head=True, head_node_args=head)
other = cluster.add_node(node_ip_address="127.0.0.3", **node)
print(cluster.address, flush=True)
for line in sys.stdin:  # a word of it removes the second node, another one adds it again
    if line == "remove\\n":
        cluster.remove_node(other, allow_graceful=False)
    else:
        other = cluster.add_node(node_ip_address="127.0.0.3", **node)
    print(line, flush=True)
cluster.shutdown()
"""
SCRIPT = """
import os, sys, threading
from pathlib import Path
from actorflow.distributed.member import current_rank

member = current_rank()
agent = os.getppid()
actor = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1]
absent = [name for name in ("OMP_NUM_THREADS", "RAY_AUTH_TOKEN") if name not in os.environ]
seen = os.environ["MASTER_ADDR"], os.environ["LOCAL_WORLD_SIZE"], os.environ["ACTORFLOW_SEED"]
if member is None:
    sys.exit(print("alone"))
print(member.all_gather_object("say", (member.rank, *seen, len(absent))), flush=True)
print(*member.all_gather_object("name", actor), flush=True)
if sys.argv[1:] == ["wait"] or (*sys.argv[1:], os.environ["ACTORFLOW_EPOCH"]) == ("wait once", "1"):
    threading.Event().wait()
"""


@pytest.fixture(scope="module")
def cluster():
    """Yield the environment of a driver, with the address of a Ray of two nodes in ADDRESS."""
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environ = {**os.environ, **own, "RAY_USAGE_STATS_ENABLED": "0", "ACTORFLOW_SEED": "7"}
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER], env=environ, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        address = ""
        while not re.fullmatch(r"127\.0\.0\.2:\d+", address):
            address = process.stdout.readline().strip()
            assert address or process.poll() is None

        def say(word):
            process.stdin.write(f"{word}\n")
            process.stdin.flush()
            while process.stdout.readline().strip() != word:
                assert process.poll() is None

        yield {**environ, "ADDRESS": address}, say
        process.stdin.close()


@pytest.fixture
def launched(cluster, tmp_path):
    """Return a function that starts a launch on the cluster; what is left is killed."""
    script, started, (of_cluster, _) = tmp_path / "script.py", [], cluster
    script.write_text(SCRIPT)

    def start(*arguments, hosts="2", restarts=0, options=(), **environ):
        options = [*options, "--ray", of_cluster["ADDRESS"], "--restarts", str(restarts)]
        options += ["--hosts", hosts, "-n", hosts.rpartition(":")[2]]
        command = [sys.executable, "-m", "actorflow", "launch", "--grace", "1", *options]
        process = subprocess.Popen(
            [*command, str(script), *arguments], env={**of_cluster, **environ}, cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.extra("ray")
@pytest.mark.slow
def test_ranks_run_on_the_hosts_of_ray_and_print_through_the_launcher(launched):
    status, out, err = end_of(launched(ACTORFLOW_LINK="1:20"))  # else it is measured, and told
    rows = [(rank, "127.0.0.2", "1", "7", 2) for rank in range(2)]
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == str(rows)


@pytest.mark.extra("ray")
@pytest.mark.slow
def test_an_actor_that_is_killed_ends_the_job_with_the_name_of_its_host(launched):
    process = launched("wait")
    process.stdout.readline()
    actor = int(process.stdout.readline().split()[1])
    os.kill(actor, signal.SIGKILL)
    status, _, err = end_of(process)
    assert status == 1
    host = f"host 1 ({socket.gethostname()})"
    assert f"rank 1 on {host} is lost: its host was lost: its agent has ended" in err


@pytest.mark.extra("ray")
@pytest.mark.slow
def test_a_host_whose_actor_was_killed_gets_another_one_for_the_next_epoch(launched):
    process = launched("wait once", restarts=1)
    process.stdout.readline()
    actor = int(process.stdout.readline().split()[1])
    os.kill(actor, signal.SIGKILL)
    status, out, err = end_of(process)
    assert status == 0, err
    rows = [(rank, "127.0.0.2", "1", "7", 2) for rank in range(2)]
    assert str(rows) in out.splitlines()  # beside a line of Ray's own
    assert "actorflow launch: restart 1 of 1" in err


@pytest.mark.extra("ray")
@pytest.mark.slow
def test_a_job_takes_the_hosts_that_ray_has_and_goes_on_with_those_that_are_left(launched, cluster):
    """Two of three at most, and then one: its bundle stays empty, and is not waited for long."""
    say = cluster[1]
    process = launched("wait once", hosts="1:3", restarts=1, options=["--host-grace", "3"])
    first = process.stdout.readline()
    process.stdout.readline()
    say("remove")
    try:
        status, out, err = end_of(process)
    finally:
        say("add")
    assert first.strip() == str([(rank, "127.0.0.2", "1", "7", 2) for rank in range(2)])
    assert status == 0, err
    assert "alone" in out.splitlines()
    assert err.startswith("actorflow launch: Ray has room on 2 of 3 hosts, for this whole launch\n")
    assert "actorflow launch: 1 rank with " in err


@pytest.mark.extra("ray")
@pytest.mark.slow
def test_a_ray_of_this_machine_alone_needs_no_token(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    command = [sys.executable, "-m", "actorflow", "launch", "--ray", "local", "-n", "2"]
    done = subprocess.run(
        [*command, str(script)], env={**environ, "ACTORFLOW_SEED": "7"}, cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    rows = [(rank, "127.0.0.1", "2", "7", 2) for rank in range(2)]
    assert done.stdout.splitlines()[0] == str(rows)


@pytest.mark.extra("ray")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"hosts": "3"}, "--hosts 3: Ray has 2 hosts with a CPU; start more by 'ray start"),
        ({"RAY_AUTH_TOKEN": "b" * 64}, "Ray does not take the token; give the RAY_AUTH_TOKEN with"),
    ],
    ids=["too_few", "wrong_token"],
)
def test_what_ray_refuses_is_told_at_once(launched, options, expected):
    status, out, err = end_of(launched(**options))
    assert (status, out) == (1, "")
    assert expected in err
