"""Processes of ranks that are none."""

import signal


class FakeRank:
    """A rank's process that lives until a test says that it has exited, and notes its signals."""

    tail, code, is_forced, is_stopped = None, None, False, False
    exit_code, is_stopped_next = 0, False

    def __init__(self, rank, sent):
        self.rank, self.pidfd, self.sent = rank, 1000 + rank, sent

    def send(self, number):
        self.sent.append((self.rank, number))

    def kill_group(self):
        self.send(signal.SIGKILL)

    def wait(self):
        return self.exit_code

    def look_for_stop(self):
        self.is_stopped = self.is_stopped_next
