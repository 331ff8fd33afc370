"""Who is let in, and who is not: the coordinator against clients that mean no good."""

import socket

import msgpack
import pytest
import zmq
from zmq_clients import ENOUGH_MS, Client

from actorflow.distributed.messages import (
    VERSION,
    Hello,
    RankKeys,
    ScriptEnded,
    StepReached,
    encode,
    read_keys_fd,
    routing_id,
    write_keys_fd,
)
from compiler.contract.errors import InternalError


@pytest.fixture
def job(served):
    return served(2, handshake_ms=500, most_bytes=1 << 20)


@pytest.fixture
def client(job):
    made = []

    def connect(**options):
        made.append(Client(job.coordinator.keys(0), **options))
        return made[-1]

    yield connect
    for one in made:
        one.close()


def still_serves(client):
    """A rank with its key is welcome, whoever came before."""
    rank = client()
    rank.socket.send_multipart(encode(Hello()))
    assert rank.socket.poll(ENOUGH_MS)
    return msgpack.unpackb(rank.socket.recv_multipart()[0]) == [VERSION, "Welcome", 2]


def test_a_rank_with_its_key_is_let_in(client, job):
    assert still_serves(client)
    assert job.refused == []


def test_a_key_that_is_not_listed_is_refused(client, job):
    stranger = client(pair=zmq.curve_keypair())
    assert stranger.event(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    assert still_serves(client)
    assert job.refused == ["a connection from 127.0.0.1 without a key of this job was refused"]


def test_a_client_without_keys_or_for_another_server_is_refused(client, job):
    failed = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_DISCONNECTED)
    assert client(curve=False).event(*failed)
    assert client(server=zmq.curve_keypair()[0]).event(*failed)
    assert still_serves(client)


def test_bytes_at_random_and_silence_are_disconnected(client, job):
    for said in (bytes(range(256)), b""):
        with socket.create_connection(("127.0.0.1", job.coordinator.port)) as raw:
            raw.settimeout(ENOUGH_MS / 1000)
            if said:
                raw.sendall(said)
            try:
                while raw.recv(4096):
                    pass
            except ConnectionResetError:
                pass
    assert still_serves(client)


def test_a_message_that_is_too_long_is_disconnected(client, job):
    rank = client()
    rank.socket.send_multipart([b"", bytes(2 << 20)])
    assert rank.event(zmq.EVENT_DISCONNECTED)
    assert still_serves(client)


def test_a_rank_under_the_name_of_another_is_refused(client, job):
    impostor = client(name=routing_id(1, 1))
    impostor.socket.send_multipart(encode(ScriptEnded()))
    impostor.socket.send(b"")
    job.wait_refused(2)
    assert still_serves(client)
    assert set(job.refused) == {"a message came under the name of another rank; it was refused"}
    assert not job.coordinator.has_left(1)


def test_what_is_malformed_is_refused_in_words_and_the_next_is_heard(client, job):
    rank = client()
    head = encode(StepReached(1, 2))[0]
    for frames in ([b"\xc1"], [head, b"more"], [msgpack.packb([VERSION, "Welcome", 2])]):
        rank.socket.send_multipart(frames)
    rank.socket.send_multipart(encode(Hello()))
    assert rank.socket.poll(ENOUGH_MS)
    job.wait_refused(3)
    assert job.refused == [
        "a message of rank 0 was refused: the bytes are not msgpack (FormatError)",
        "a message of rank 0 was refused: StepReached is a sequence of 4, expected a row of 3"
        " fields (run, step, waited_us)",
        "a message of rank 0 was refused: its kind is 'Welcome', expected a message that may be"
        " sent here",
    ]


def test_it_listens_on_this_machine_alone(job):
    assert job.coordinator.endpoint == f"tcp://127.0.0.1:{job.coordinator.port}"
    router, _ = job.coordinator.sockets
    assert (router.linger, router.maxmsgsize) == (0, 1 << 20)


def test_keys_are_handed_over_once_and_each_rank_has_its_own(job):
    keys = [job.coordinator.keys(rank) for rank in (0, 1)]
    packed = keys[0].to_bytes()
    assert RankKeys.from_bytes(read_keys_fd(write_keys_fd(packed))) == keys[0]
    assert keys[0].secret != keys[1].secret
    with pytest.raises(InternalError, match="hold no keys of a rank"):
        RankKeys.from_bytes(b"\xc1" + packed)
    with pytest.raises(InternalError, match="descriptor 99999 holds no keys"):
        read_keys_fd(99_999)
