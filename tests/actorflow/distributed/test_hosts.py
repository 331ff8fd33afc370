"""Agents of other hosts: who is let in, what is heard, and when a host is lost."""

import os
import platform
import socket
from dataclasses import replace

import msgpack
import pytest
import zmq
from zmq_clients import ENOUGH_MS, Client

from actorflow.distributed.agent_messages import (
    AgentAlive,
    AgentHello,
    AgentRefused,
    AgentWelcome,
    HostLimits,
    LauncherAlive,
    SignalReceived,
    ToAgent,
)
from actorflow.distributed.hosts import (
    AgentLost,
    AgentServer,
    AgentSilent,
    HostAgents,
    differences,
)
from actorflow.distributed.messages import VERSION, decode, encode
from actorflow.distributed.signal_notes import SignalNotes
from actorflow.environment.host import kernel_host
from compiler.contract.errors import ActorflowError

SILENCE_S = 15.0
SECOND = "another process is host 0 of this job already"
LIMITS = HostLimits(60.0, SILENCE_S)
HELLO = AgentHello("nodeB", "0.1", "3.11.7", "ab" * 32, 8)


class Hosts:
    """A server of agents whose time is what a test says, and clients that connect to it."""

    def __init__(self, num_hosts=2, limits=LIMITS):
        self.refused, self.clients, self.now_s = [], [], 0.0
        self.server = AgentServer(
            num_hosts, b"s" * 32, ("127.0.0.1", 0), limits,
            clock=lambda: 0.0, refused=self.refused.append, handshake_ms=500,
        )  # fmt: skip

    def client(self, index=0, name=b"0.a", **options):
        self.clients.append(Client(self.server.keys(index, ("x.py",)), name=name, **options))
        return self.clients[-1]

    def poll(self, *sources):
        poller = zmq.Poller()
        for source in (*self.server.sockets, *sources):
            poller.register(source, zmq.POLLIN)
        return dict(poller.poll(ENOUGH_MS))

    def event(self, client, *wanted):
        """Serve until something happened to the connection of a client."""
        while self.poll(client.monitor):
            self.server.turn(self.now_s)
            if client.monitor.poll(0) and client.next_event() in wanted:
                return

    def news(self, count=1):
        """Serve until so many news have come."""
        news = []
        while len(news) < count:
            assert self.poll()
            news += self.server.turn(self.now_s)
        return news

    def heard(self, client):
        """Serve until a client was told something."""
        while client.socket not in self.poll(client.socket):
            self.server.turn(self.now_s)
        return decode(client.socket.recv_multipart(), ToAgent)

    def connected(self, index=0, name=b"0.a"):
        client = self.client(index, name)
        client.socket.send_multipart(encode(HELLO))
        assert self.news() == [(index, HELLO)]
        assert self.heard(client) == AgentWelcome()
        return client

    def rival(self, name, hello=HELLO):
        """Connect a second agent of host 0; return its client once the server knows it."""
        client = self.client(0, name)
        client.socket.send_multipart(encode(hello))
        # No agent says this before it is welcome; that it is refused tells that the hello was read.
        client.socket.send_multipart(encode(AgentAlive(1)))
        assert self.heard(client).reason.startswith(SECOND)
        return client

    def silent_for(self, seconds):
        """Let time go by in steps of a loop that is awake; return the news."""
        news, end_s = [], self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.5
            news += self.server.turn(self.now_s)
        return news

    def close(self):
        for client in self.clients:
            client.close()
        self.server.close()


@pytest.fixture
def hosts():
    all_hosts = Hosts()
    yield all_hosts
    all_hosts.close()


def test_an_agent_is_welcome_and_answered(hosts):
    client = hosts.connected()
    client.socket.send_multipart(encode(AgentAlive(7)))
    assert hosts.news() == [(0, AgentAlive(7))]
    assert hosts.heard(client) == LauncherAlive(7)
    assert hosts.refused == []


def test_clients_without_the_secret_are_turned_away_and_agents_are_still_served(hosts):
    hosts.event(hosts.client(pair=zmq.curve_keypair()), zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    ended = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_DISCONNECTED)
    hosts.event(hosts.client(curve=False), *ended)
    hosts.event(hosts.client(server=zmq.curve_keypair()[0]), *ended)
    address, port = hosts.server.endpoint.removeprefix("tcp://").split(":")
    for said in (bytes(range(256)), b""):
        with socket.create_connection((address, int(port))) as raw:
            raw.settimeout(ENOUGH_MS / 1000)
            raw.sendall(said)
            try:
                while raw.recv(4096):
                    pass
            except ConnectionResetError:
                pass
    hosts.connected()
    assert hosts.refused == ["a connection from 127.0.0.1 without a key of this job was refused"]


def test_an_agent_that_sends_too_much_is_lost(hosts):
    client = hosts.connected()
    client.socket.send_multipart([b"", bytes(2 << 20)])
    assert hosts.news() == [(0, AgentLost("was lost: its agent has ended"))]


def test_what_another_version_says_is_refused_in_words(hosts):
    client = hosts.client()
    client.socket.send_multipart([msgpack.packb([VERSION + 1, "AgentHello"])])
    refused = hosts.heard(client)
    assert refused == AgentRefused(
        "host 0 sends what this version of actorflow cannot read (the version is 3, expected"
        " version 2 of messages)"
    )
    assert hosts.refused == [refused.reason]


def test_a_second_process_of_one_host_is_refused_as_soon_as_the_first_says_a_word(hosts):
    first = hosts.connected()
    second = hosts.rival(b"0.b")
    hosts.silent_for(2.5)
    first.socket.send_multipart(encode(AgentAlive(1)))
    assert hosts.news() == [(0, AgentAlive(1))]
    assert hosts.heard(second).reason.startswith(SECOND)
    assert hosts.silent_for(3.5) == []


def test_an_agent_that_came_again_has_the_place_of_one_that_says_nothing_more(hosts):
    """As after a power cut, which closes no connection."""
    first, again = hosts.connected(), replace(HELLO, num_cores=4)
    second = hosts.rival(b"0.b", again)
    assert hosts.silent_for(2.5) == []
    text = "was lost: its agent was started again, and the one before was silent for 3 s"
    assert hosts.silent_for(1) == [(0, AgentLost(text)), (0, again)]
    assert hosts.heard(second) == AgentWelcome()
    # It was stopped, and not gone: it ends, as its ranks have no part in the job any more.
    first.socket.send_multipart(encode(AgentAlive(2)))
    assert hosts.heard(first).reason.startswith(SECOND)
    second.socket.send_multipart(encode(AgentAlive(1)))
    assert hosts.news() == [(0, AgentAlive(1))]


def test_of_two_agents_that_came_again_the_first_waits_and_one_that_went_is_forgotten(hosts):
    hosts.connected()
    second = hosts.rival(b"0.b")
    third = hosts.client(name=b"0.c")
    third.socket.send_multipart(encode(HELLO))
    assert hosts.heard(third).reason.startswith(SECOND)
    hosts.clients.remove(second)
    second.close()
    hosts.poll()
    assert hosts.silent_for(3.5) == []


def test_an_agent_that_is_unknown_is_not_heard_before_its_hello(hosts):
    client = hosts.client()
    client.socket.send_multipart(encode(AgentAlive(1)))
    client.socket.send_multipart(encode(HELLO))
    assert hosts.news() == [(0, HELLO)]


def test_a_host_is_lost_after_its_silence_and_once(hosts):
    hosts.connected()
    assert hosts.silent_for(3.5) == []
    assert hosts.silent_for(0.5) == [(0, AgentSilent(15.0))]
    assert hosts.silent_for(10.5) == []
    text = "was lost: its agent has been silent for 15 s (--host-timeout)"
    assert hosts.silent_for(5) == [(0, AgentLost(text))]


def test_a_word_ends_the_silence(hosts):
    client = hosts.connected()
    hosts.silent_for(14.5)
    client.socket.send_multipart(encode(AgentAlive(1)))
    assert hosts.news() == [(0, AgentAlive(1))]
    assert hosts.silent_for(14.5) == [(0, AgentSilent(15.0))]


def test_a_launcher_that_was_stopped_blames_nobody(hosts):
    hosts.connected()
    hosts.now_s += 3600
    assert hosts.server.turn(hosts.now_s) == []
    assert hosts.silent_for(2.5) == []
    assert [type(one) for _, one in hosts.silent_for(12)] == [AgentSilent, AgentLost]


def test_a_connection_that_ends_is_heard_at_once_and_another_agent_may_come(hosts):
    hosts.connected().close()
    hosts.clients.clear()
    assert hosts.news() == [(0, AgentLost("was lost: its agent has ended"))]
    hosts.connected(name=b"0.b")


def test_an_agent_that_comes_while_another_is_lost_is_kept(hosts):
    """The system may give its connection the number of the one that broke."""
    hosts.connected().close()
    hosts.clients.clear()
    late = hosts.client(index=1, name=b"1.a")
    late.socket.send_multipart(encode(HELLO))
    news = sorted(hosts.news(2), key=lambda one: one[0])
    assert news == [(0, AgentLost("was lost: its agent has ended")), (1, HELLO)]
    late.socket.send_multipart(encode(AgentAlive(1)))
    assert hosts.news() == [(1, AgentAlive(1))]


def test_a_second_server_on_a_port_is_refused(hosts):
    address, port = hosts.server.endpoint.removeprefix("tcp://").split(":")
    with pytest.raises(ActorflowError, match=f"cannot listen to agents at {address}:{port}"):
        AgentServer(2, b"s" * 32, (address, int(port)), HostLimits(1.0, 1.0))


def test_hosts_that_come_late_or_not_at_all_are_waited_for(hosts):
    poller = zmq.Poller()
    agents = HostAgents(poller, None, hosts.server)
    hosts.client(index=1, name=b"1.a").socket.send_multipart(encode(HELLO))
    times = iter([0.0, *[59.0] * 2, 60.0, 60.0])
    with pytest.raises(ActorflowError, match=r"host 0 of 2 did not connect .* within 60 s"):
        agents.gather(clock=lambda: next(times, 60.0))


def test_agents_are_started_on_hosts_that_have_none(hosts):
    started = []

    def start(missing):
        started.append(missing)
        for index in missing:
            name = b"%d.%d" % (index, len(started))
            hosts.client(index=index, name=name).socket.send_multipart(encode(HELLO))

    agents = HostAgents(zmq.Poller(), None, hosts.server, start_agents=start)
    assert agents.gather(clock=lambda: 0.0)
    assert started == [(0, 1)]
    hosts.clients.pop(0).close()
    while 0 in agents.hellos:
        hosts.poll()
        agents.turn({}, 0.0)
    assert agents.gather(clock=lambda: 0.0)
    assert started == [(0, 1), (0,)]


@pytest.fixture
def elastic():
    """Two of three hosts are enough."""
    all_hosts = Hosts(3, HostLimits(60.0, SILENCE_S, least_hosts=2, grace_s=30.0))
    yield all_hosts
    all_hosts.close()


def test_hosts_that_are_enough_wait_for_the_others_for_the_grace_time(elastic):
    agents = HostAgents(zmq.Poller(), None, elastic.server)
    for index in (0, 2):
        said(elastic, agents, index)
    times = iter([0.0, 29.0, 30.0, 30.0])
    assert agents.gather(clock=lambda: next(times))
    assert (agents.hosts, agents.names) == ((0, 2), ("0 (nodeB)", "2 (nodeB)"))
    # One that came meanwhile has part; who was absent before is not waited for again.
    said(elastic, agents, 1)
    assert agents.gather(clock=lambda: 100.0)
    assert agents.hosts == (0, 1, 2)


def test_a_host_that_is_lost_is_waited_for_until_the_grace_time_is_over(elastic):
    agents = HostAgents(zmq.Poller(), None, elastic.server)
    clients = [said(elastic, agents, index) for index in range(3)]
    assert agents.gather(clock=lambda: 0.0)
    elastic.clients.remove(clients[1])
    clients[1].close()
    while 1 in agents.hellos:
        elastic.poll()
        agents.turn({}, 0.0)
    times = iter([0.0, 29.0, 30.0, 30.0])
    assert agents.gather(clock=lambda: next(times))
    assert agents.hosts == (0, 2)
    assert agents.gather(clock=lambda: 60.0)  # at once: it is not awaited any more
    assert agents.hosts == (0, 2)


def test_fewer_hosts_than_are_needed_are_waited_for_and_named(elastic):
    agents = HostAgents(zmq.Poller(), None, elastic.server)
    said(elastic, agents, 0)
    times = iter([0.0, 59.0, 60.0, 60.0])
    with pytest.raises(ActorflowError, match=r"hosts 1, 2 of 2:3 did not connect .* within 60 s"):
        agents.gather(clock=lambda: next(times, 60.0))


def test_hosts_that_cannot_come_are_not_waited_for_where_others_are_enough(elastic):
    absent = {1: "host 1 of 3 cannot come: no agent there"}
    agents = HostAgents(zmq.Poller(), None, elastic.server, lambda: absent)
    said(elastic, agents, 0)
    said(elastic, agents, 2)
    assert agents.gather(clock=lambda: 0.0)
    assert agents.hosts == (0, 2)


def said(hosts, agents, index):
    """Connect the agent of a host; return its client once the agents know it."""
    client = hosts.client(index=index, name=b"%d.a" % index)
    client.socket.send_multipart(encode(HELLO))
    while index not in agents.hellos:
        assert hosts.poll()
        agents.turn({}, 0.0)
    return client


def test_a_signal_to_an_agent_ends_the_wait_for_hosts(hosts):
    agents, notes = HostAgents(zmq.Poller(), None, hosts.server), SignalNotes(lambda: 0.0)
    with notes.woken():
        client = hosts.client(index=1, name=b"1.a")
        client.socket.send_multipart(encode(HELLO))
        client.socket.send_multipart(encode(SignalReceived(15)))
        assert not agents.gather(notes, clock=lambda: 0.0)
    assert notes.first == 15


A, B, SAME = "host 0 (nodeA)", "host 1 (nodeB)", "install the same version on all hosts"


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (HELLO, ""),
        (replace(HELLO, num_cores=1), ""),
        (replace(HELLO, version="0.2"), f"{B} has actorflow 0.2, {A} 0.1: {SAME}"),
        (replace(HELLO, python="3.12.1"), f"{B} has Python 3.12.1, {A} 3.11.7: {SAME}"),
        (
            replace(HELLO, hostname="node\nB", script="cd" * 32),
            "host 1 (node\\nB) has another script, of SHA-256 cdcdcdcdcdcd, host 0 (nodeA)"
            " abababababab: give all hosts the same script",
        ),
        (
            replace(HELLO, script=""),
            f"{B} has another script, of SHA-256 none, {A} abababababab: give all hosts the same"
            " script",
        ),
    ],
)
def test_hosts_that_differ_are_both_named(other, text):
    assert differences({0: replace(HELLO, hostname="nodeA"), 1: other}) == text


NATIVE = replace(
    HELLO,
    hostname="nodeA",
    processor="EPYC 9654",
    instructions="avx2 avx512f fma",
    compiler="gcc 12.2.0",
    libraries="numpy 2.4.6, onednn-cpu-gomp 2023.2.0",
)
OTHERS = {
    "processor": (
        {"processor": "Xeon 8480", "instructions": "amx_bf16 avx2"},
        f"{B} has the processor Xeon 8480, {A} EPYC 9654: take equal hosts",
    ),
    "instructions": (
        {"instructions": "avx2 avx512f"},
        f"{B} has instructions that the other lacks: none, {A} fma: take equal hosts",
    ),
    "compiler": (
        {"compiler": ""},
        f"{B} has the C compiler none, {A} gcc 12.2.0: install the same version on all hosts, or"
        " name it by CC",
    ),
    "libraries": (
        {"libraries": "numpy 2.4.5, onednn-cpu-gomp 2023.2.0"},
        f"{B} has numpy 2.4.5, onednn-cpu-gomp 2023.2.0, {A} numpy 2.4.6, onednn-cpu-gomp"
        " 2023.2.0: install the same versions on all hosts",
    ),
}


def come(hosts, *hellos):
    for index, hello in enumerate(hellos):
        client = hosts.client(index=index, name=b"%d.a" % index)
        client.socket.send_multipart(encode(hello))


@pytest.mark.parametrize("what", OTHERS)
def test_hosts_whose_kernels_may_have_other_bits_are_refused(hosts, what):
    fields, text = OTHERS[what]
    come(hosts, NATIVE, replace(NATIVE, hostname="nodeB", **fields))
    with pytest.raises(ActorflowError) as raised:
        HostAgents(zmq.Poller(), None, hosts.server).gather(clock=lambda: 0.0)
    mend = "kernels, and so bits, depend on it: give --mixed-hosts to run all the same"
    assert str(raised.value) == f"{text}; {mend}"


def test_hosts_whose_kernels_may_have_other_bits_are_taken_where_the_user_says_so(hosts, caplog):
    fields, text = OTHERS["compiler"]
    come(hosts, NATIVE, replace(NATIVE, hostname="nodeB", **fields))
    agents = HostAgents(zmq.Poller(), None, hosts.server)
    assert agents.gather(clock=lambda: 0.0, are_mixed=True)
    assert caplog.messages == [f"{text}; copies of a value may drift apart on such hosts"]


def test_flags_of_a_processor_that_no_kernel_is_chosen_by_are_not_compared():
    assert set(kernel_host({"PATH": os.environ["PATH"]}).instructions.split()).isdisjoint(
        {"fpu", "hypervisor", "md_clear", "ibrs", "pti"}
    )


@pytest.mark.skipif(platform.machine() != "x86_64", reason="has no sse2")
def test_the_instructions_of_a_host_are_recorded():
    assert {"sse", "sse2"} <= set(kernel_host(os.environ).instructions.split())
