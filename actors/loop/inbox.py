"""The inbox of a dispatcher: all that other threads send it, in one queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

COMMAND = -1
"""In an inbox: run the next command. Messages of the machine are never negative."""


class Inbox:
    """Messages of the machine, and commands, in the order in which they were sent.

    `post` takes the message that ends a firing, from any thread. The dispatcher's thread alone
    calls `get`, which blocks until there is a code, `is_empty`, and, where the code was `COMMAND`,
    `take_command`, which returns what is to be called.
    """

    __slots__ = ("_add_command", "get", "is_empty", "post", "take_command")

    def __init__(self) -> None:
        codes: SimpleQueue[int] = SimpleQueue()
        commands: deque[Callable[[], object]] = deque()
        # The methods of C themselves: every firing of a worker comes through here, and every step.
        self.post, self.get, self.is_empty = codes.put, codes.get, codes.empty
        self._add_command, self.take_command = commands.append, commands.popleft

    def call_soon_threadsafe(self, command: Callable[[], object]) -> None:
        """Have the dispatcher's thread call something, after the messages already sent."""
        # In this order: who takes the message finds the command. Both are atomic in CPython, so a
        # signal handler may come in between, and no lock is needed that it could wait for.
        self._add_command(command)
        self.post(COMMAND)
