"""Which host this is, where the launcher is, and the secret: from options, variables and a file."""

import os

import pytest
from error_texts import raises

from actorflow.distributed.agent_messages import HostLimits, agent_keys, derived_pair
from actorflow.distributed.rendezvous import (
    host_index,
    launcher_address,
    listen_address,
    read_key_file,
    write_key_file,
)
from compiler.contract.errors import CompileError


@pytest.mark.parametrize(
    ("option", "environ", "index"),
    [
        (1, {"ACTORFLOW_HOST_INDEX": "0"}, 1),
        (None, {"ACTORFLOW_HOST_INDEX": "2", "SLURM_NODEID": "1"}, 2),
        (None, {"RANK": "1", "WORLD_SIZE": "3", "SLURM_NODEID": "2"}, 1),
        (None, {"RANK": "5", "WORLD_SIZE": "12", "SLURM_NODEID": "2"}, 2),
        (None, {"SLURM_NODEID": "0", "PMI_RANK": "1", "PMI_SIZE": "3"}, 0),
        (None, {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}, 1),
        (None, {"PMI_RANK": "2", "PMI_SIZE": "3"}, 2),
        (None, {"JOB_COMPLETION_INDEX": " 1 "}, 1),
    ],
)
def test_a_host_finds_its_number(option, environ, index):
    assert host_index(option, 3, environ) == index


@pytest.mark.parametrize(
    ("option", "environ"),
    [
        (None, {}),
        (None, {"PMI_RANK": "1", "PMI_SIZE": "12"}),
        (3, {}),
        (-1, {}),
        (None, {"SLURM_NODEID": "3"}),
        (None, {"JOB_COMPLETION_INDEX": "one"}),
    ],
)
def test_a_host_without_a_number_is_refused(option, environ):
    with raises(CompileError):
        host_index(option, 3, environ)


@pytest.mark.parametrize(
    ("option", "environ", "address"),
    [
        ("10.0.0.1:7", {"MASTER_ADDR": "else"}, ("10.0.0.1", 7)),
        ("nodeA", {}, ("nodeA", 29_400)),
        (None, {"MASTER_ADDR": "nodeA", "MASTER_PORT": "5"}, ("nodeA", 5)),
        (None, {"MASTER_ADDR": "job-0.job"}, ("job-0.job", 29_400)),
        ("[::1]:7", {}, ("[::1]", 7)),
        ("[fd00::1]", {}, ("[fd00::1]", 29_400)),
        (None, {"MASTER_ADDR": "fd00::1", "MASTER_PORT": "5"}, ("[fd00::1]", 5)),
    ],
)
def test_the_launcher_is_found(option, environ, address):
    assert launcher_address(option, environ) == address


@pytest.mark.parametrize(
    ("option", "environ"),
    [
        (None, {"MASTER_PORT": "5"}),
        ("nodeA:0", {}),
        ("nodeA:65536", {}),
        (":29400", {}),
        ("::1:29400", {}),
        ("[::1", {}),
        ("[nodeA]:29400", {}),
        (None, {"MASTER_ADDR": "nodeA", "MASTER_PORT": "x"}),
    ],
)
def test_an_address_that_is_none_is_refused(option, environ):
    with raises(CompileError):
        launcher_address(option, environ)


def test_the_launcher_listens_where_other_hosts_reach_it(monkeypatch):
    assert listen_address("127.0.0.2") == "127.0.0.2"
    assert listen_address("localhost") == "127.0.0.1"
    assert listen_address("[fd00::1]") == "[fd00::1]"
    found = [(2, 1, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: found)
    with raises(CompileError):
        listen_address("nodeA")


def test_a_secret_is_written_once_for_its_user_alone(tmp_path):
    path = tmp_path / "key"
    write_key_file(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(read_key_file(path)) == 32
    with pytest.raises(FileExistsError):
        write_key_file(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602])
def test_a_secret_that_others_can_read_or_change_is_refused(tmp_path, mode):
    path = tmp_path / "key"
    write_key_file(path)
    path.chmod(mode)
    with pytest.raises(CompileError, match="others can read or change it"):
        read_key_file(path)


@pytest.mark.parametrize("text", [b"", b"5a" * 31, b"5a" * 33, b"zz" * 32, b"\xff" * 64])
def test_a_file_without_a_secret_is_refused(tmp_path, text):
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_bytes(text)
    with pytest.raises(CompileError, match="expected 64 hexadecimal digits"):
        read_key_file(path)


def test_no_file_is_no_secret(tmp_path):
    with raises(CompileError):
        read_key_file(None)
    with pytest.raises(CompileError, match="No such file or directory"):
        read_key_file(tmp_path / "none")
    with pytest.raises(CompileError, match="Is a directory"):
        read_key_file(tmp_path)


def test_keys_of_all_parties_follow_from_the_secret_and_differ():
    secret = os.urandom(32)
    limits = HostLimits(1.0, 2.0)
    keys = [agent_keys(secret, index, 2, "tcp://a:1", limits, ["x.py"]) for index in (0, 1)]
    pairs = {derived_pair(secret, "launcher"), *[(k.public, k.secret) for k in keys]}
    assert len(pairs) == 3
    assert keys[0].server_public == keys[1].server_public == derived_pair(secret, "launcher")[0]
    assert type(keys[0]).from_bytes(keys[0].to_bytes()) == keys[0]
    assert derived_pair(os.urandom(32), "launcher")[0] != keys[0].server_public
