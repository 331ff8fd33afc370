"""What processes tell in a named pipe, and that they have ended, whoever's children they are."""

import os
import select
from contextlib import contextmanager

from launching import ENOUGH_S


@contextmanager
def tells_of(path):
    """Make a named pipe in which processes tell; yield a function: so many of their lines."""
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR)
    text = b""

    def lines(count):
        nonlocal text
        while text.count(b"\n") < count:
            assert select.select([fd], [], [], ENOUGH_S)[0], text
            text += os.read(fd, 4096)
        return text.decode().splitlines()

    try:
        yield lines
    finally:
        os.close(fd)


def are_gone(pids):
    """Wait until processes have ended; return whether they have."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        is_gone = bool(poller.poll(ENOUGH_S * 1000))
        os.close(fd)
        if not is_gone:
            return False
    return True
