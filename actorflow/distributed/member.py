"""The client side of a rank: its number, all-gathers with the other ranks, and shared runs.

    member = current_rank()            # None where this process is alone
    values = member.all_gather_object("compare plans", b"...")
    run = DistributedRun(member, first_step=0, obey=..., abort=...)
    run.begin()
    run.report_data_ready(1)
    run.ended(1)

`all_gather_object` blocks until all ranks have brought a value. A run agrees without blocking: it
reports its steps and requests to the coordinator, which instructs all ranks alike.
`actorflow.distributed.agreement` decides that.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import cast

import zmq

from actorflow.distributed.distributed_run import DistributedRun
from actorflow.distributed.messages import (
    MOST_MESSAGE_BYTES,
    Aborted,
    Ack,
    FromRank,
    GatherDone,
    GatherEntered,
    GatherTimedOut,
    Hello,
    OfRun,
    RankFailed,
    RankKeys,
    RunReady,
    ScriptEnded,
    StepReached,
    ToRank,
    decode,
    encode,
    pack_value,
    routing_id,
)
from actorflow.environment.settings import SettingsError, logger
from actorflow.tensor.tracer import is_users, users_line
from actors.machine.thread_stacks import MAX_CALLS, StackCall, thread_stacks
from compiler.contract.attrs import PlainValue
from compiler.contract.codec import DecodeError, from_msgpack
from compiler.contract.errors import ActorflowError, CompileError, InternalError, PeerFailed

# A socket of zmq belongs to one thread. So whoever has something to say puts it into a queue and
# rings: `say` takes no lock and may be called by any thread and by signal handlers.


CONTACT_S = 1.0
"""What the first contact may take at least."""


class RankLink:
    """The link of a rank to its coordinator. It says Hello by itself.

    The agent of the host is this process's parent, without which it is killed, and the agent looks
    for a launcher that is silent. So the link looks for a coordinator that cannot be reached, at
    first or any more, and for nothing else: one that is stopped for a while is waited for, as the
    system takes what is sent to it.

    Args:
        keys: of this rank.
        hear: called with each message, on the link's thread.
        broken: called once, on that thread, with what ended it early.
    """

    def __init__(
        self,
        keys: RankKeys,
        hear: Callable[[ToRank], object],
        broken: Callable[[BaseException], object],
    ) -> None:
        self._hear, self._broken = hear, broken
        # SimpleQueue.put is reentrant, unlike Queue.put: a signal handler may say something within
        # it.
        self._says: SimpleQueue[FromRank | None] = SimpleQueue()
        # One counter for any number of rings; a write from a handler never blocks.
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(
            target=self._serve, args=(keys,), name="actorflow-rank", daemon=True
        )
        # Before the thread starts, so Hello is the first message.
        self.say(Hello())
        self._thread.start()

    def say(self, message: FromRank) -> None:
        """Send a message, after those that were said before. Does not wait for it."""
        self._says.put(message)
        # After `put`: the thread reads the bell first and the queue then, so no message is left
        # behind.
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """End the thread; what was said and is not sent yet may be lost. Idempotent."""
        if self._thread.is_alive():
            self._says.put(None)
            os.eventfd_write(self._bell, 1)
            # `hear` and `broken` run on the link's thread and may close it, which cannot join
            # itself.
            if self._thread is not threading.current_thread():
                self._thread.join()

    def _serve(self, keys: RankKeys) -> None:
        context = zmq.Context()
        try:
            socket = context.socket(zmq.DEALER)
            _prepare(socket, keys)
            socket.connect(keys.endpoint)
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(self._bell, zmq.POLLIN)
            # A zmq socket reconnects in silence; only its monitor tells that the connection broke.
            lost = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            poller.register(lost, zmq.POLLIN)
            wait_s = max(keys.wait_s, CONTACT_S) if keys.wait_s else math.inf
            deadline_s = time.monotonic() + wait_s
            is_known = False
            while self._send_all(socket):
                left_s = deadline_s - time.monotonic()
                is_timed = not (is_known or math.isinf(left_s))
                # Rounded up to ms: rounded down, the last wait would be 0 and spin until the
                # deadline.
                ready = dict(poller.poll(max(0, math.ceil(left_s * 1000)) if is_timed else None))
                # Messages first: an Aborted that came before the connection broke is the better
                # reason.
                is_known = self._hear_all(socket) or is_known
                if lost in ready:
                    lost.recv_multipart()
                if lost in ready and is_known:
                    raise _unreachable(keys, "was lost: the system closed the connection")
                if not is_known and left_s <= 0:
                    raise _unreachable(keys, f"was not established within {wait_s:g} s")
        except BaseException as error:
            self._broken(error)
        finally:
            # Linger 0: what cannot be sent to a coordinator that is gone must not hold up the exit.
            context.destroy(0)

    def _send_all(self, socket: zmq.Socket[bytes]) -> bool:
        """Send what was said; return whether to go on."""
        try:
            # Reading sets the counter to 0, so all rings so far are answered by this one pass.
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return True
        pending: list[FromRank] = []
        while True:
            try:
                message = self._says.get_nowait()
            except Empty:
                break
            if message is None:
                return False
            pending.append(message)
        # A rank that reaches steps faster than the link sends tells only the last of them.
        for message in shortened(pending):
            socket.send_multipart(encode(message), copy=False)
        return True

    def _hear_all(self, socket: zmq.Socket[bytes]) -> bool:
        """Handle all messages that have arrived; return whether there was one."""
        has_heard = False
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return has_heard
            has_heard = True
            try:
                message = decode([frame.buffer for frame in frames], ToRank)
            except DecodeError as error:
                logger.warning("a message of the coordinator was refused: %s", error)
                continue
            self._hear(message)


def shortened(messages: Sequence[FromRank]) -> list[FromRank]:
    """Return messages without StepReached that a later one of the same run follows directly."""
    shorter: list[FromRank] = []
    for message in messages:
        last = shorter[-1] if shorter else None
        if (
            isinstance(message, StepReached)
            and isinstance(last, StepReached)
            and message.run == last.run
        ):
            shorter.pop()
        shorter.append(message)
    return shorter


def _unreachable(keys: RankKeys, text: str) -> PeerFailed:
    why = (
        "Ranks and their launcher communicate over the loopback device: it may be down, as in a new"
        " network namespace ('ip link set lo up'), or a firewall drops its packets; 'actorflow"
        " doctor' tests it"
    )
    if keys.host:
        why = (
            f"It is on host {keys.host}: the network between the hosts may be down, or a firewall"
            " drops packets to that port, which is another one at every start"
        )
    return PeerFailed(
        f"the link of rank {keys.rank} to its coordinator at {keys.endpoint} {text}. {why}"
        " (ACTORFLOW_RANK_SECONDS sets how long ranks wait)"
    )


def _prepare(socket: zmq.Socket[bytes], keys: RankKeys) -> None:
    if keys.wait_s:  # after which what the other system did not take ends the connection
        socket.tcp_maxrt = int(keys.wait_s * 1000)
    socket.ipv6 = "[" in keys.endpoint
    socket.curve_serverkey = keys.server_public
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    socket.routing_id = routing_id(keys.rank, keys.epoch)
    socket.maxmsgsize = MOST_MESSAGE_BYTES
    socket.linger = 0
    # What is under way is bounded by the agreement: a window of steps, and one meeting.
    socket.sndhwm = socket.rcvhwm = 0


# For a rank that hangs.

_MOST_FRAMES = 8
"""Of a thread: the innermost ones say why it does not go on."""
_MOST_THREADS = 8


def user_stack_dump() -> str:
    """Return the calls of threads that are in the user's code, and of the main thread, as text.

    The main thread comes last: while a plan runs it only waits, and what hangs is a function of the
    user's that we call, such as `on_step` or a data source. Of each the innermost calls are told,
    and the user's innermost one.
    """
    stacks, main = thread_stacks(), threading.main_thread()
    threads = [t for t in threading.enumerate() if t is not threading.current_thread()]
    others = [t for t in threads if t is not main and _users_call(stacks.get(t.ident or 0, ()))]
    # The newest: older ones may be left of runs that are over.
    texts = [_told(t, stacks[t.ident or 0]) for t in others[-_MOST_THREADS:]]
    if main in threads and main.ident in stacks:
        texts.append(_told(main, stacks[main.ident]))
    elif main in threads:
        texts.append(f"thread {main.name!r}: not among the newest {MAX_CALLS} threads\n")
    return "\n".join(texts)


def _users_call(stack: Sequence[StackCall]) -> StackCall | None:
    """Return the innermost call of the user's code, or None."""
    return next((call for call in stack if is_users(call.file)), None)


def _told(thread: threading.Thread, stack: Sequence[StackCall]) -> str:
    calls, users = list(stack[:_MOST_FRAMES]), _users_call(stack)
    if users is not None and users not in calls:
        calls.append(users)
    rows = [(call.file, call.line, call.function, None) for call in reversed(calls)]
    return f"thread {thread.name!r}:\n{''.join(traceback.StackSummary.from_list(rows).format())}"


_MISTAKES = (CompileError, SettingsError, SyntaxError)
"""Errors that a script raises again whenever it is started."""

_GLANCE_S = 0.25
"""How long a wait lasts before the thread looks whether a signal came."""
_NEWS_S = 1.0
"""How long a rank that missed another waits for the reason, before it tells what it knows."""
_GOODBYE_S = 5.0
"""How long a rank that ends waits until that was heard; without it its exit would be a failure."""


class RankClient:
    """One rank of a job of several. Its methods may be called from any thread.

    Attributes:
        rank: which one this is, from 0.
        num_ranks: how many there are.
        host: the name of its host, "" where all ranks run on one.
        local_rank: its number among the ranks of its host.
        hosts: the names of all ranks' hosts, by rank; none where all run on one.
        epoch: how often the ranks of the job were started, this time counted.
    """

    def __init__(self, keys: RankKeys) -> None:
        self.rank, self.num_ranks = keys.rank, keys.num_ranks
        self.host, self.epoch = keys.host, keys.epoch
        self.local_rank = keys.local_rank
        self.hosts: tuple[str, ...] = ()
        self._wait_s = keys.wait_s
        self._pid = os.getpid()
        # Guards a meeting from its number to its answer: two threads of a rank never meet at once.
        self._lock = threading.Lock()
        self._num_meetings = self._num_runs = 0
        self._runs: tuple[DistributedRun, ...] = ()
        """Those that are open: several, where a script steps several plans in turn."""
        self._failure: ActorflowError | None = None
        self._has_told = self._has_left = self._is_broken = False
        self._news: SimpleQueue[GatherDone | GatherTimedOut | None] = SimpleQueue()
        self._noted, self._is_over = threading.Event(), threading.Event()
        # Here, because whoever is alone has no need of zmq.

        self._link = RankLink(keys, self._hear, self._break)

    @property
    def failure(self) -> ActorflowError | None:
        """The error that ended the job, the same on all ranks; None if there is none.

        To be raised instead of what a run raises because it was aborted. PeerFailed, but for a bug.
        """
        return self._failure

    def all_gather_object(self, name: str, value: PlainValue) -> list[PlainValue]:
        """Return the values of all ranks, by rank, once all have come to this name.

        Ranks come to the same names in the same order; a name says what for, in words that follow
        on "to", and may come again. A value has at most 256 MiB, packed.

        Raises PeerFailed, on every rank, where one has come to another name, has ended its script,
        has failed, or does not come in time; ValueError for a value that cannot travel.
        """
        packed = pack_value(value, name)
        self._check_process()
        with self._lock:
            self._check()
            # Under the lock, so the numbers of a rank follow each other on the wire.
            self._num_meetings += 1
            number = self._num_meetings
            self._link.say(GatherEntered(number, name, packed, users_line()))
            waited_s = 0.0
            is_told = is_final = False
            while True:
                try:
                    # Not longer: a signal that is given to another thread is handled only between.
                    reply = self._news.get(timeout=_GLANCE_S)
                except Empty:
                    waited_s += _GLANCE_S
                    if self._wait_s and waited_s >= self._wait_s / 2 and not is_told:
                        is_told = True  # whose fault it is, the coordinator knows
                        seconds = math.ceil(self._wait_s)
                        self._link.say(GatherTimedOut(number, seconds, is_final))
                    continue
                self._check()
                if isinstance(reply, GatherTimedOut):
                    if reply.number == number:
                        waited_s, is_told, is_final = 0.0, False, True
                    continue
                # None only wakes: `leave` and `_abort` put it. An older number is of a call that
                # was interrupted.
                if reply is not None and reply.number == number:
                    return [cast("PlainValue", from_msgpack(one)) for one in reply.values]

    def learn_hosts(self) -> None:
        """Learn the hosts of all ranks, which all call this before their scripts begin.

        So whoever compiles a plan alone asks nobody. Raises what `all_gather_object` raises.
        """
        if self.host:
            hosts = self.all_gather_object("know the hosts of all ranks", self.host)
            self.hosts = tuple([str(host) for host in hosts])

    def begin_run(self, run: DistributedRun) -> None:
        """Meet the others for a run, and number it.

        All ranks begin their runs in the same order; several may be open at a time. Waits for the
        others as `all_gather_object` does, so that one that does not come is found, and raises
        what that raises.
        """
        self._num_runs += 1
        number = self._num_runs
        self.all_gather_object(f"begin run {number} of its script", run.first_step)
        run.number = number
        # A new tuple: the link's thread iterates over the old one without a lock.
        self._runs = (*[other for other in self._runs if not other.is_over], run)
        self.say(RunReady(number, run.first_step))
        if self._failure is not None:  # it came while the run was made, and found none to abort
            run.abort(self._failure)

    def say(self, message: FromRank) -> None:
        """Send a message to the coordinator. Does not wait for it, and takes no lock."""
        self._link.say(message)

    def fail(self, error: BaseException, *, op: str = "", line: str = "", shown: str = "") -> bool:
        """Report to the other ranks that this rank has failed; their runs are aborted.

        The first failure of a job counts; a later call can only add `shown`. An error that is
        another's fault (PeerFailed with its rank, or a cause that is one) is told with its name.
        Waits, at most some seconds, until it was heard; returns whether it was, so that the
        launcher shows it and nobody else has to.

        Args:
            error: what was raised.
            op: the op it was raised in, where there is one.
            line: the user's line, "file.py:12".
            shown: what the user is to see of it, instead of the text of the error.
        """
        if self._pid != os.getpid():
            return False
        causes = _causes(error)
        peer = next((e for e in causes if isinstance(e, PeerFailed)), None)
        if peer is not None:
            # A collective may miss a rank before anybody knows why; who does will tell us.
            self._is_over.wait(_NEWS_S)
        if self._is_broken:
            return False
        is_consequence = self._failure is not None and (peer is not None or self._failure in causes)
        if is_consequence or (self._has_told and not shown):
            return True
        self._has_told = True
        at_fault = self.rank if peer is None or peer.rank is None else peer.rank
        text = str(peer or error)
        if peer is None and not isinstance(error, ActorflowError):
            text = f"{type(error).__name__}: {error}"
        # The Ack of an earlier call must not answer for this one.
        self._noted.clear()
        is_mistake = peer is None and isinstance(error, _MISTAKES)
        self._link.say(RankFailed(at_fault, text, op, line, shown, is_mistake))
        return self._noted.wait(_GOODBYE_S) and not self._is_broken

    def leave(self) -> None:
        """Report that this rank's script has ended without an error; end the link. Idempotent.

        A run that is stepped ends with the last step that was asked for; any other that is open is
        given up, which the others are told. A thread that waits in `all_gather_object`, or calls
        it afterwards, gets PeerFailed.
        """
        # A forked child has the object but not the link's thread; it must not speak for the rank.
        if self._pid == os.getpid():
            self._has_left = True
            # Wakes a thread that waits in `all_gather_object`, which then finds `_has_left`.
            self._news.put(None)
            if not self._has_told:
                for run in self._runs:
                    run.leave()
                self._has_told = True
                self._link.say(ScriptEnded())
                self._noted.wait(_GOODBYE_S)
            self._link.close()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._has_left:
            raise PeerFailed(
                f"rank {self.rank} has ended its script and left the process group, so it can"
                " train no more. Train in the script itself, or in threads that are not daemons"
            )

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ActorflowError(
                f"rank {self.rank} is process {self._pid}, from which this one, {os.getpid()}, was"
                " forked; it is no rank. Start it with multiprocessing's 'spawn', and do not train"
                " in it"
            )

    def _hear(self, message: ToRank) -> None:
        """Take a message, on the link's thread."""
        if isinstance(message, GatherDone | GatherTimedOut):
            self._news.put(message)
        elif isinstance(message, Ack):
            self._noted.set()
        elif isinstance(message, Aborted):
            if message.rank == self.rank and not self._has_told:  # others have found its fault
                print(
                    f"rank {self.rank} is here:\n{user_stack_dump()}", file=sys.stderr, flush=True
                )
            self._abort(PeerFailed(message.text, rank=message.rank))
        elif isinstance(message, OfRun):
            for run in self._runs:
                run.hear(message)

    def _abort(self, error: ActorflowError) -> None:
        if self._failure is None:
            self._failure = error
            self._is_over.set()
            self._news.put(None)
            for run in self._runs:
                run.abort(error)

    def _break(self, error: BaseException) -> None:
        broken: ActorflowError
        if isinstance(error, PeerFailed):
            broken = error
        else:
            broken = InternalError(f"the link to the coordinator broke: {error!r}")
            broken.__cause__ = error
        self._is_broken = True
        self._noted.set()  # nobody will answer
        self._abort(broken)


def _causes(error: BaseException) -> list[BaseException]:
    """Return an error and what led to it."""
    chain = [error]
    # A cause may be cyclic where user code set it.
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    return chain


_given: list[RankClient] = []
"""The member of this process, where it is a rank: the launcher's child puts it there, once."""


def init_rank(keys: RankKeys) -> RankClient:
    """Make this process a rank. Raises InternalError when it is one already."""
    if _given:
        raise InternalError("this process is a rank already")
    _given.append(RankClient(keys))
    return _given[0]


def current_rank(environ: Mapping[str, str] = os.environ) -> RankClient | None:
    """Return the client of this process in a job of several ranks; None for a single process.

    Raises ActorflowError if the environment names several ranks and there is no coordinator.
    """
    if _given:
        return _given[0] if _given[0].num_ranks > 1 else None
    size, rank = environ.get("WORLD_SIZE", ""), environ.get("RANK", "")
    if not rank or size in ("", "1"):
        return None
    raise ActorflowError(
        f"RANK={rank} and WORLD_SIZE={size} are set, but this process is no rank that 'actorflow"
        " launch' started; start the script with 'actorflow launch -n RANKS SCRIPT.py', or unset"
        " both to train alone"
    )
