"""How the hosts of a job find each other: the number of each, an address, and one secret.

The same command is started once on every host, by hand or by a scheduler. Host 0 is the launcher;
the others connect to it. A scheduler says which host this is in a variable of its own. The secret
is a file that only its user can read, the same on all hosts: an argument of a command can be read
by everybody on the machine, and a variable is inherited by whatever the script starts.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from actorflow.distributed.agent import Agent, serve_agent
from actorflow.distributed.agent_messages import SECRET_BYTES, HostLimits, agent_keys
from actorflow.distributed.hosts import AgentServer, HostAgents
from actorflow.distributed.launcher import RankLaunch, launch
from compiler.contract.errors import CompileError


@dataclass(frozen=True, slots=True)
class HostOfJob:
    """This host among those of its job.

    `index` is its number among `num_hosts`, `launcher` the host and port of host 0, `secret` that
    of the job, `limits` how long hosts wait for each other.
    """

    index: int
    num_hosts: int
    launcher: tuple[str, int]
    secret: bytes
    limits: HostLimits


def launch_on_hosts(asked: RankLaunch, environ: Mapping[str, str], here: HostOfJob) -> int:
    """Take part in a launch on several hosts, from the main thread; return the exit status.

    Host 0 is the launcher and an agent, every other one an agent alone. Raises ActorflowError as
    `launch` does, and CompileError for an address that cannot be listened on.
    """
    limits, (name, port) = here.limits, here.launcher
    if here.index > 0:
        endpoint = f"tcp://{name}:{port}"
        keys = agent_keys(here.secret, here.index, here.num_hosts, endpoint, limits, asked.command)
        return serve_agent(keys, environ)
    poller = zmq.Poller()
    agent = Agent(asked.command, environ, poller)
    server = AgentServer(here.num_hosts, here.secret, (listen_address(name), port), limits)
    return launch(asked, environ, HostAgents(poller, agent, server))


HOST_INDEX = "ACTORFLOW_HOST_INDEX"
_INDEX_VARIABLES = (
    (HOST_INDEX, ""),
    ("RANK", "WORLD_SIZE"),
    ("SLURM_NODEID", ""),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("JOB_COMPLETION_INDEX", ""),
)
"""Variables with the number of a host, the first that is set counts; and such with the number of
processes, which has to be that of hosts: else a scheduler has started one for each rank."""

DEFAULT_PORT = 29_400
_LARGEST_PORT = 65_535


def host_index(
    option: int | None, num_hosts: int, environ: Mapping[str, str], least_hosts: int | None = None
) -> int:
    """Return which host of the job this is, from an option or from the environment.

    `least_hosts` are enough to start, None for all `num_hosts`. Raises CompileError where nothing
    says the number, or it is not one from 0 to `num_hosts` - 1.
    """
    sizes = [str(size) for size in range(least_hosts or num_hosts, num_hosts + 1)]
    said, text = ("--host-index", str(option)) if option is not None else _said(sizes, environ)
    if not said:
        names = ", ".join([name for name, _ in _INDEX_VARIABLES])
        raise CompileError(
            f"--hosts {num_hosts}: nothing says which of the hosts this is; give --host-index, or"
            f" one of the variables {names} (RANK, OMPI_COMM_WORLD_RANK and PMI_RANK where one"
            " process is started on each host)"
        )
    if not (text.isascii() and text.isdigit() and int(text) < num_hosts):
        raise CompileError(
            f"{said}: expected the number of a host, from 0 to {num_hosts - 1}, came {text!r}"
        )
    return int(text)


def _said(sizes: Sequence[str], environ: Mapping[str, str]) -> tuple[str, str]:
    for name, size in _INDEX_VARIABLES:
        text = environ.get(name, "").strip()
        if text and (not size or environ.get(size, "").strip() in sizes):
            return name, text
    return "", ""


def launcher_address(option: str | None, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the host and the port of the launcher, from HOST:PORT or from the environment.

    An IPv6 address has its brackets, as in an endpoint of zmq. Raises CompileError where nothing
    says them, or the port is none.
    """
    said, text = "--coordinator", option or ""
    if option is None and environ.get("MASTER_ADDR"):
        said = "MASTER_ADDR:MASTER_PORT"
        address = environ["MASTER_ADDR"]
        address = f"[{address}]" if _is_ipv6(address) else address
        text = f"{address}:{environ.get('MASTER_PORT') or DEFAULT_PORT}"
    if not text:
        raise CompileError(
            "--hosts: nothing says where the launcher is; give --coordinator HOST:PORT with the"
            " address of host 0, or the variables MASTER_ADDR and MASTER_PORT"
        )
    host, colon, port = text.rpartition(":")
    host, port = (host, port) if colon and not text.endswith("]") else (text, str(DEFAULT_PORT))
    is_port = port.isascii() and port.isdigit() and 0 < int(port) <= _LARGEST_PORT
    is_host = _is_bracketed(host) or not {*"[:]"} & {*host}
    if not host or not is_host or not is_port:
        raise CompileError(
            f"{said}: expected HOST:PORT with a name, an IPv4 address or an IPv6 address in"
            f" brackets, and a port from 1 to {_LARGEST_PORT}, came {text!r}"
        )
    return host, int(port)


def _is_bracketed(host: str) -> bool:
    """Whether a host is an IPv6 address in brackets."""
    return host.startswith("[") and host.endswith("]") and _is_ipv6(host[1:-1])


def _is_ipv6(address: str) -> bool:
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return True


def listen_address(host: str) -> str:
    """Return the IPv4 address of a name of this host, on which the launcher is to listen.

    An IPv6 address is returned as it is: of a name with both, hosts might choose different ones.
    Raises CompileError for a name without one, and for one that only this host can reach.
    """
    if _is_bracketed(host):
        return host
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise CompileError(
            f"--coordinator: {host!r} has no IPv4 address: {error.strerror}; give that of host 0,"
            " or its IPv6 address in brackets"
        ) from None
    address = str(found[0][4][0])
    # As Debian names a machine in /etc/hosts. Who says 127.* means all hosts to be this one.
    if address.startswith("127.") and not (host.startswith("127.") or host == "localhost"):
        raise CompileError(
            f"--coordinator: {host!r} is {address} on this host, which no other host can reach;"
            " give an address of host 0 in the network of all hosts"
        )
    return address


def write_key_file(path: Path) -> None:
    """Write a new secret to a file that only this user can read. Raises OSError if it exists."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(os.urandom(SECRET_BYTES).hex() + "\n")


def read_key_file(path: Path | None) -> bytes:
    """Return the secret of a job. Raises CompileError for a file that others can read, or none."""
    make = "write one with 'actorflow launch --make-key FILE' and copy it to all hosts"
    if path is None:
        raise CompileError(
            "--hosts: several hosts need one secret; give --key-file FILE or ACTORFLOW_KEY_FILE,"
            f" and {make}"
        )
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            text = file.read(2 * SECRET_BYTES + 2)
    except OSError as error:
        raise CompileError(f"key file {path}: {error.strerror}; {make}") from None
    if about.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(about.st_mode) & 0o077:
        mode = stat.S_IMODE(about.st_mode)
        raise CompileError(
            f"key file {path}: others can read or change it (owner {about.st_uid}, mode {mode:o});"
            f" expected owner {os.geteuid()} and mode 600: make a new one, as this may be known"
        )
    try:
        secret = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise CompileError(
            f"key file {path}: expected {2 * SECRET_BYTES} hexadecimal digits, and found none or"
            f" something else; {make}"
        )
    return secret
