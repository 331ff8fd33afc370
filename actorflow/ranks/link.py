"""A rank's end of the wire: a thread that owns the socket, and hears and says what others want.

A socket of zmq belongs to one thread. So whoever has something to say puts it into a queue and
rings: `say` takes no lock and may be called by any thread and by signal handlers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

import zmq

from actorflow.logs import logger
from actorflow.ranks.keys import RankKeys, routing_id
from actorflow.ranks.messages import FromRank, Hello, Reached, ToRank
from actorflow.ranks.wire import MOST_MESSAGE_BYTES, Malformed, decode, encode


class RankLink:
    """The link of a rank to its coordinator. It says Hello by itself.

    The coordinator is this process's parent, without which it is killed: the link looks after
    nothing but messages.

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
        self._says: SimpleQueue[FromRank | None] = SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(
            target=self._serve, args=(keys,), name="actorflow-rank", daemon=True
        )
        self.say(Hello())
        self._thread.start()

    def say(self, message: FromRank) -> None:
        """Send a message, after those that were said before. Does not wait for it."""
        self._says.put(message)
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """End the thread; what was said and is not sent yet may be lost. Idempotent."""
        if self._thread.is_alive():
            self._says.put(None)
            os.eventfd_write(self._bell, 1)
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
            while self._send_all(socket):
                poller.poll()
                self._hear_all(socket)
        except BaseException as error:
            self._broken(error)
        finally:
            context.destroy(0)

    def _send_all(self, socket: zmq.Socket[bytes]) -> bool:
        """Send what was said; return whether to go on."""
        try:
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
        for message in shortened(pending):
            socket.send_multipart(encode(message), copy=False)
        return True

    def _hear_all(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                message = decode([frame.buffer for frame in frames], ToRank)
            except Malformed as error:
                logger.warning("the coordinator sent %s; it was refused", error)
                continue
            self._hear(message)


def shortened(messages: Sequence[FromRank]) -> list[FromRank]:
    """Return what is to be sent of messages: of steps of a run that follow each other the last."""
    found: list[FromRank] = []
    for message in messages:
        last = found[-1] if found else None
        if isinstance(message, Reached) and isinstance(last, Reached) and message.run == last.run:
            found.pop()
        found.append(message)
    return found


def _prepare(socket: zmq.Socket[bytes], keys: RankKeys) -> None:
    socket.curve_serverkey = keys.server_public
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    socket.routing_id = routing_id(keys.rank)
    socket.maxmsgsize = MOST_MESSAGE_BYTES
    socket.linger = 0
    # What is under way is bounded by the agreement: a window of steps, and one meeting.
    socket.sndhwm = socket.rcvhwm = 0
