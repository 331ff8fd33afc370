"""Ray as the way to hosts: `actorflow launch --ray ADDRESS --hosts H` (extra `[ray]`).

Ray places one actor on each host, and all that the actor does is to start the agent of that host
and to hand over what it prints. From there on a job runs as with any other way in: agents connect
to the launcher, which is a driver of Ray, by keys that the actors brought. Ray is slow for messages
(0.5 ms, and 0.5 GB/s between hosts) and late to see a host die (14 s), so no step, state or sign of
life passes through it. Bytes, texts and numbers alone cross it: it unpickles what it is sent.

Ray listens on all interfaces of a host and runs whatever it is asked to, so a token is demanded. It
does not encrypt: who can read its links can read the keys, as they can read the token.

An actor is not restarted by Ray, which would run it with the keys of an agent that is lost already.
A host that is to be there again gets a new actor in its bundle (`RayHosts.start`).
"""

from __future__ import annotations

import os
import secrets
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import zmq

from actorflow.distributed.agent import start_agent
from actorflow.distributed.agent_messages import SECRET_BYTES, AgentKeys, HostLimits
from actorflow.distributed.coordinator import LOOPBACK
from actorflow.distributed.hosts import AgentServer, HostAgents
from actorflow.distributed.launcher import RankLaunch, launch
from compiler.contract.errors import ActorflowError

LOCAL = "local"
"""The address that stands for a Ray of this machine alone, which is started for the job."""
_ANSWER_S = 15.0
_START_S = 60.0
_GOODBYE_S = 5.0
_READ_S = 1.0
_READ_BYTES = 64 << 10
_LOCAL_STORE_BYTES = 80 << 20  # the least that Ray takes is 75 MiB; nothing of ours goes there
_NOT_PASSED_ON = ("OMP_NUM_THREADS", "RAY_AUTH_TOKEN")
"""What Ray puts into the environment of an actor: one thread, which is not the user's wish, and the
token, which no script needs."""
_PREFIX = "ACTORFLOW_"


def launch_by_ray(
    asked: RankLaunch,
    environ: Mapping[str, str],
    address: str,
    num_hosts: int,
    limits: HostLimits,
) -> int:
    """Run a script as several ranks on hosts of Ray; return the job's exit status.

    Args:
        asked: what is launched.
        environ: the launcher's environment; what begins with ACTORFLOW_ is given to all hosts.
        address: "local", "auto", or host and port of Ray's head.
        num_hosts: how many hosts run ranks.
        limits: how long hosts are waited for, and how many are enough.

    Raises ActorflowError where Ray is not installed, cannot be reached, has too few hosts, or where
    agents cannot be started.
    """
    with ExitStack() as stack:
        own_address = stack.enter_context(_connected(address, num_hosts, environ))
        hosts = RayHosts(num_hosts, limits, environ)
        stack.callback(hosts.close)
        if hosts.num_hosts < num_hosts:
            text = f"Ray has room on {hosts.num_hosts} of {num_hosts} hosts, for this whole launch"
            print(f"actorflow launch: {text}", file=sys.stderr, flush=True)
        asked = replace(asked, num_ranks=asked.num_ranks * hosts.num_hosts // num_hosts)
        secret = secrets.token_bytes(SECRET_BYTES)
        server = AgentServer(hosts.num_hosts, secret, (own_address, 0), limits)

        def start_agents(missing: tuple[int, ...]) -> None:
            hosts.start({index: server.keys(index, tuple(asked.command)) for index in missing})

        agents = HostAgents(zmq.Poller(), None, server, hosts.absent, start_agents)
        stack.callback(agents.close, 1)
        return launch(asked, environ, agents)


class HostActor:
    """What Ray runs on a host: starts its agent, and hands over what that prints.

    Args:
        keys: packed `AgentKeys`.
        variables: of the environment, beside those of Ray's own processes on the host.
        folder: the working directory.
    """

    # Here and not in a method: Ray runs this on the main thread. The system kills an agent with
    # the thread that started it, and methods of concurrent actors run on threads that come and go.
    def __init__(self, keys: bytes, variables: tuple[tuple[str, str], ...], folder: str) -> None:
        self._problem, self._pipes = "", list[int]()
        environ = {k: v for k, v in os.environ.items() if k not in _NOT_PASSED_ON}
        environ.update(variables)
        pipes = os.pipe(), os.pipe()
        try:
            os.chdir(folder)
            written = pipes[0][1], pipes[1][1]
            self._agent = start_agent(AgentKeys.from_bytes(keys), environ, written)
        except OSError as error:  # an exception here would reach the launcher as 40 lines of Ray's
            self._problem = f"{error.strerror or error}: {error.filename or folder}"
        for read_end, write_end in pipes:
            os.close(write_end)
            self._pipes.append(read_end)
        self._open = dict(zip(self._pipes, (0, 1), strict=True))

    def problem(self) -> str:
        """Return why the agent was not started, "" if it was."""
        return self._problem

    def read_output(self) -> tuple[bytes, bytes, bool]:
        """Return what agent and rank 0 printed to stdout and stderr, and whether that was all.

        Waits for a second, if there is nothing.
        """
        came = [b"", b""]
        poller = select.poll()
        for fd in self._open:
            poller.register(fd, select.POLLIN)
        for fd, _ in poller.poll(_READ_S * 1000) if self._open else ():
            output = os.read(fd, _READ_BYTES)
            came[self._open[fd]] = output
            if not output:
                del self._open[fd]
        return came[0], came[1], not self._open


class RayHosts:
    """The hosts of a job in Ray's hands: an actor on each, never two on one.

    Attributes:
        num_hosts: how many Ray has room on, at most as many as were asked for.

    Args:
        num_hosts: how many are asked for.
        limits: how many are enough, and how long Ray may take to find room on so many.
        environ: see `launch_by_ray`.

    Raises ActorflowError where Ray has too few hosts, or has no room on them in time.
    """

    def __init__(self, num_hosts: int, limits: HostLimits, environ: Mapping[str, str]) -> None:
        import ray

        self._variables = tuple((k, v) for k, v in environ.items() if k.startswith(_PREFIX))
        self._actors: dict[int, Any] = {}
        self._relays: list[threading.Thread] = []
        self._ended: dict[int, str] = {}
        """Why nothing more comes from a host; written by its relay, one key each."""
        alive = [n for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) >= 1]
        least = limits.least_hosts or num_hosts
        if len(alive) < least:
            raise ActorflowError(
                f"--hosts {_range(least, num_hosts)}: Ray has {_hosts(len(alive))} with a CPU;"
                " start more by 'ray start --address', or ask for fewer"
            )
        # Fewer and fewer, as all bundles of a group are placed or none.
        for count in range(min(num_hosts, len(alive)), least - 1, -1):
            wait_s = limits.wait_s if count == least else max(1.0, limits.grace_s)
            self._group = _placed(count, wait_s)
            if self._group is not None:
                self.num_hosts = count
                return
        raise ActorflowError(
            f"--hosts {_range(least, num_hosts)}: Ray has {_hosts(len(alive))}, but found no free"
            f" CPU on {least} of them within {limits.wait_s:g} s (ACTORFLOW_RANK_SECONDS); 'ray"
            " status' says what they are used for"
        )

    def start(self, keys: Mapping[int, AgentKeys]) -> None:
        """Start the agents of hosts by their numbers, in place of those that were there.

        Waits for none of them: agents of other hosts are to be answered meanwhile. `absent` tells
        of one that could not be started.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # One call reads output at a time, another may ask for a problem.
        options = {"num_cpus": 1, "max_concurrency": 2, "max_restarts": 0}
        for index, own in keys.items():
            if (before := self._actors.pop(index, None)) is not None:
                ray.kill(before)
            self._ended.pop(index, None)
            place = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            )
            made = ray.remote(HostActor).options(scheduling_strategy=place, **options)
            actor = made.remote(own.to_bytes(), self._variables, str(Path.cwd()))
            self._actors[index] = actor
            relay = threading.Thread(target=self._relay, args=(index, actor), daemon=True)
            self._relays.append(relay)
            relay.start()

    def absent(self) -> dict[int, str]:
        """Return which hosts cannot come any more, and why."""
        of = self.num_hosts
        return {i: f"host {i} of {of} cannot come: {why}" for i, why in tuple(self._ended.items())}

    def close(self) -> None:
        """Print what is under way, and end what is left. The agents have been told to end."""
        import ray

        for relay in self._relays:
            relay.join(_GOODBYE_S)
        for actor in self._actors.values():
            ray.kill(actor)
        ray.util.remove_placement_group(self._group)

    def _relay(self, index: int, actor: Any) -> None:
        """Print what a host prints, until its agent has ended or the actor has died."""
        import ray

        try:
            reason = str(ray.get(actor.problem.remote(), timeout=_START_S))
            is_over = bool(reason)
            while not is_over:
                out, err, is_over = ray.get(actor.read_output.remote())
                _write(sys.stdout.buffer, out)
                _write(sys.stderr.buffer, err)
            reason = reason or "its agent has ended; it printed what is above"
        except ray.exceptions.GetTimeoutError:
            ray.kill(actor)  # one that came later would print to nobody
            reason = f"Ray has started no actor there within {_START_S:g} s"
        except ray.exceptions.RayError as error:
            reason = f"Ray lost its actor: {_last_line(str(error))}"
        if self._actors.get(index) is actor:  # and none that was started in its place
            self._ended[index] = reason


def _placed(num_hosts: int, wait_s: float) -> Any:
    """Return a group of as many bundles, each on a host of its own; None where it has no place."""
    import ray
    from ray.util.placement_group import placement_group

    group = placement_group([{"CPU": 1}] * num_hosts, strategy="STRICT_SPREAD")
    if _is_placed(group.wait, wait_s):
        return group
    ray.util.remove_placement_group(group)
    return None


def _is_placed(wait: Callable[[int], bool], wait_s: float) -> bool:
    """Return whether a group got its place within a time, 0 for ever."""
    # Ray waits whole seconds, and no signal interrupts it.
    waited_s = 0
    while not wait(1):
        waited_s += 1
        if wait_s and waited_s >= wait_s:
            return False
    return True


def _write(stream: BinaryIO, output: bytes) -> None:
    # Without a reader any more: ranks go on, as they would with their output in a file.
    with suppress(OSError, ValueError):
        stream.write(output)
        stream.flush()


@contextmanager
def _connected(address: str, num_hosts: int, environ: Mapping[str, str]) -> Iterator[str]:
    """Connect this process to Ray; yield the address at which Ray's hosts reach it."""
    if address == LOCAL and num_hosts != 1:
        raise ActorflowError(
            f"--ray local is this machine alone, which is one host; came --hosts {num_hosts}. Give"
            " --hosts 1, or --ray HOST:PORT of a cluster"
        )
    if "://" in address:
        raise ActorflowError(
            f"--ray {address}: expected HOST:PORT, 'auto' or 'local'. The hosts connect to the"
            " launcher, so it runs on a host of the cluster: start it there, or by 'ray job submit'"
        )
    is_local = address == LOCAL
    if is_local:
        # Of a Ray that nobody else knows, so the token is made here. Ray reads both when it is
        # imported.
        os.environ.update(
            RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_USAGE_STATS_ENABLED="0"
        )
    else:
        check_token(environ)
    try:
        import ray
    except ImportError as error:
        raise ActorflowError(
            f"--ray needs Ray, which cannot be imported ({error}): python -m pip install"
            " 'actorflow[ray]'"
        ) from None
    if not is_local:
        check_answer(address)
    options: dict[str, Any] = {"logging_level": "CRITICAL", "log_to_driver": False}
    if is_local:
        options |= {"num_cpus": 1, "include_dashboard": False}
        options["object_store_memory"] = _LOCAL_STORE_BYTES
    try:
        ray.init(address=address, **options)
    except (OSError, RuntimeError, ValueError) as error:  # of its own: ConnectionError, versions
        raise ActorflowError(f"--ray {address}: {_last_line(str(error))}") from error
    try:
        yield LOOPBACK if is_local else str(ray.util.get_node_ip_address())
    finally:
        ray.shutdown()


def check_token(environ: Mapping[str, str]) -> None:
    """Check that Ray demands a token and has one. Raises ActorflowError.

    Whether it is the right one, Ray says.
    """
    mode = environ.get("RAY_AUTH_MODE", "")
    if mode.lower() != "token":
        raise ActorflowError(
            f"--ray: expected RAY_AUTH_MODE=token, came {mode or 'none'}. Ray listens on all"
            " interfaces and runs what anybody asks it to; start each of its hosts and this command"
            " with RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN ('ray get-auth-token --generate'"
            " makes one)"
        )
    file = environ.get("RAY_AUTH_TOKEN_PATH") or Path("~/.ray/auth_token").expanduser()
    if not environ.get("RAY_AUTH_TOKEN") and not Path(file).is_file():
        raise ActorflowError(
            f"--ray: expected the cluster's token in RAY_AUTH_TOKEN or in the file {file}, and"
            " found none"
        )


def check_answer(
    address: str, ask: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
) -> None:
    """Check that a Ray answers at an address and takes our token. Raises ActorflowError.

    `ask` runs a command; see `subprocess.run`.
    """
    # In a process that can be ended: Ray's own connecting takes 80 s where nobody answers, and a
    # signal does not interrupt it.
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
    try:
        done = ask(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        raise ActorflowError(
            f"--ray {address}: no Ray answers there within {_ANSWER_S:g} s; 'ray start --head'"
            " starts one and prints its address"
        ) from None
    if done.returncode and "InvalidAuthToken" in done.stderr:
        raise ActorflowError(
            f"--ray {address}: Ray does not take the token; give the RAY_AUTH_TOKEN with which its"
            " hosts were started"
        )
    if done.returncode:
        raise ActorflowError(f"--ray {address}: {_last_line(done.stderr + done.stdout)}")


def _last_line(text: str) -> str:
    lines: Sequence[str] = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "Ray gives no reason"


def _range(least: int, most: int) -> str:
    return f"{most}" if least == most else f"{least}:{most}"


def _hosts(count: int) -> str:
    return f"{count} host{'' if count == 1 else 's'}"
