"""What the launcher and the agents of hosts say to each other: messages and keys.

An agent starts and watches the ranks of one host. That of the launcher's own host is handed these
messages as objects; the agent of another host gets them over zmq, on the wire of
`actorflow.distributed.messages`. Within a connection zmq keeps their order, drops none and repeats
none. A connection that breaks is not mended: the host is lost, and the agent ends its ranks.

All secrets of a job of several hosts follow from one: 32 bytes that every host has
(`derived_pair`), or that the launcher hands to each agent (`AgentKeys`). Those of ranks do not:
they are drawn at random for each epoch, and reach a rank through its agent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from actorflow.distributed.messages import Number, Words
from compiler.contract.codec import DecodeError, from_msgpack, from_row, to_msgpack, to_row
from compiler.contract.errors import InternalError


@dataclass(frozen=True, slots=True)
class AgentHello:
    """An agent is there.

    `hostname` names its host in texts. `version` is that of actorflow, `python` that of Python,
    `script` the SHA-256 of the script's file, in hexadecimal digits. `num_cores` is what the ranks
    of the host may use. `log_dir` is the folder there for what ranks above 0 print, "" for none.
    The rest decides the bits of kernels: see `KernelHost`.
    """

    hostname: Words
    version: Words
    python: Words
    script: Words
    num_cores: Number
    log_dir: Words = ""
    processor: Words = ""
    instructions: Words = ""
    compiler: Words = ""
    libraries: Words = ""


@dataclass(frozen=True, slots=True)
class AgentAlive:
    """An agent goes on; `counter` counts how often it has said so."""

    counter: Number


@dataclass(frozen=True, slots=True)
class RankUnstarted:
    """The process of a rank could not be started, for a reason."""

    epoch: Number
    rank: Number
    reason: Words


@dataclass(frozen=True, slots=True)
class RankExited:
    """The process of a rank has exited: with `status`, or by `signal`, if that is not 0.

    `is_forced` says that the agent signalled it after the grace period. `tail` is the last of what
    it printed, or nothing.
    """

    epoch: Number
    rank: Number
    status: Number
    signal: Number
    is_forced: bool
    tail: Words


@dataclass(frozen=True, slots=True)
class RankStopped:
    """The process of a rank is stopped (SIGSTOP), or goes on again."""

    epoch: Number
    rank: Number
    is_stopped: bool


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """An agent received a signal, which is meant for all ranks of the job."""

    signal: Number


@dataclass(frozen=True, slots=True)
class LinkProbed:
    """What an agent saw of its link to the launcher; `problem` is why it saw nothing, or ""."""

    round_trip_ns: Number
    bytes_per_s: Number
    problem: Words


FromAgent = (
    AgentHello | AgentAlive | RankUnstarted | RankExited | RankStopped | SignalReceived | LinkProbed
)
"""What an agent says."""


@dataclass(frozen=True, slots=True)
class AgentWelcome:
    """The launcher knows this agent."""


@dataclass(frozen=True, slots=True)
class AgentRefused:
    """The launcher does not take this agent, for a reason; it ends."""

    reason: Words


@dataclass(frozen=True, slots=True)
class ProbeLink:
    """Measure the link to a listener of the launcher (`actorflow.distributed.link_probe`)."""

    address: Words
    port: Number
    nonce: bytes


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Start ranks of an epoch, each with so many threads. `keys` are packed `RankKeys`.

    `link` is what ranks know of the link between hosts, as ACTORFLOW_LINK; "" for nothing.
    """

    epoch: Number
    num_threads: Number
    link: Words
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SignalRanks:
    """Send a signal to all ranks; those that are stopped go on."""

    epoch: Number
    signal: Number


@dataclass(frozen=True, slots=True)
class EndRanks:
    """Ranks are to end: SIGTERM after a grace period, SIGKILL after a second one."""

    epoch: Number
    grace_ms: Number


@dataclass(frozen=True, slots=True)
class LauncherAlive:
    """The launcher has heard an agent say AgentAlive so often."""

    counter: Number


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job is over, with this exit status: the agent kills what is left, and ends with it."""

    status: Number


ToAgent = (
    AgentWelcome
    | AgentRefused
    | ProbeLink
    | StartRanks
    | SignalRanks
    | EndRanks
    | LauncherAlive
    | JobEnded
)
"""What the launcher says."""


SECRET_BYTES = 32
"""Of the one secret of a job of several hosts."""


def derived_pair(secret: bytes, label: str) -> tuple[bytes, bytes]:
    """Return the CURVE keys (public, secret) of the party of this name, as Z85.

    Equal on every host that has the job's secret, so none of them needs to travel.
    """
    # Keyed BLAKE2b (RFC 7693) is a pseudorandom function: no key tells anything of another one.
    own = hashlib.blake2b(
        label.encode(), key=secret, digest_size=SECRET_BYTES, person=b"actorflow-hosts"
    )
    encoded = z85.encode(own.digest())
    return zmq.curve_public(encoded), encoded


@dataclass(frozen=True, slots=True)
class AgentKeys:
    """What the agent of a host needs to serve a launcher.

    `index` is the number of its host among `num_hosts`. Keys are Z85. `wait_s` is how long it waits
    for the launcher at first, 0 for ever, and `timeout_s` how long the launcher may be silent
    later. `command` is the script with its arguments.
    """

    index: Number
    num_hosts: Number
    endpoint: Words
    server_public: bytes
    public: bytes
    secret: bytes
    wait_s: float
    timeout_s: float
    command: tuple[Words, ...]

    def to_bytes(self) -> bytes:
        """Return the keys as bytes, which are as secret as they are."""
        return to_msgpack(to_row(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> AgentKeys:
        """Return the keys that `to_bytes` packed. Raises InternalError for other bytes."""
        try:
            return from_row(cls, from_msgpack(data))
        except DecodeError as error:
            raise InternalError(f"the bytes hold no keys of an agent: {error}") from None


@dataclass(frozen=True, slots=True)
class HostLimits:
    """How long hosts are waited for: at the start (0 for ever), and when they are silent later.

    `least_hosts` are enough to start; None where all are needed. Once they are there, the others
    are waited for `grace_s` more.
    """

    wait_s: float
    silence_s: float
    least_hosts: int | None = None
    grace_s: float = 0.0


def agent_keys(
    secret: bytes,
    index: int,
    num_hosts: int,
    endpoint: str,
    limits: HostLimits,
    command: Sequence[str],
) -> AgentKeys:
    """Return the keys of the agent of a host, which follow from the secret of the job.

    Args:
        secret: the one secret of the job.
        index: which host it is.
        num_hosts: how many there are.
        endpoint: where the launcher listens to agents, "tcp://HOST:PORT".
        limits: how long the agent waits for the launcher.
        command: the script with its arguments.
    """
    server_public, _ = derived_pair(secret, "launcher")
    public, own_secret = derived_pair(secret, f"agent {index}")
    return AgentKeys(
        index=index,
        num_hosts=num_hosts,
        endpoint=endpoint,
        server_public=server_public,
        public=public,
        secret=own_secret,
        wait_s=limits.wait_s,
        timeout_s=limits.silence_s,
        command=tuple(command),
    )
