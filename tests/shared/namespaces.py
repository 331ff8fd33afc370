"""Two network namespaces of this machine as hosts, joined by a link that can be taken down."""

import os
import shutil
import subprocess
from contextlib import contextmanager
from itertools import count

import pytest

_numbers = count()


class Pair:
    """Two namespaces; `address` is that of the first one, at which the second one reaches it."""

    def __init__(self):
        number = next(_numbers)
        self.names = [f"af{os.getpid()}.{number}{letter}" for letter in "AB"]
        # Unique on this machine, as both ends are made outside of the namespaces.
        self._ends = [f"v{os.getpid()}.{number}{letter}" for letter in "AB"]
        self.address = "10.77.0.1"

    def inside(self, index):
        """Return the words before a command that is to run in one of the two."""
        return ["ip", "netns", "exec", self.names[index]]

    def set_link(self, state):
        """Take the link up or down; addresses stay."""
        _run("ip", "-n", self.names[0], "link", "set", self._ends[0], state)

    def make(self):
        for name in self.names:
            _run("ip", "netns", "add", name)
        (a, b), (near, far) = self.names, self._ends
        _run("ip", "link", "add", near, "netns", a, "type", "veth", "peer", "name", far, "netns", b)
        for number, (name, end) in enumerate(zip(self.names, self._ends, strict=True), start=1):
            _run("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", end, "up")

    def delete(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*words):
    subprocess.run(words, capture_output=True, check=True)


@contextmanager
def two_namespaces():
    """Yield a `Pair`; skip the test where this user, or this kernel, can make none."""
    if shutil.which("ip") is None:
        pytest.skip("the command 'ip' (iproute2) is not here")
    pair = Pair()
    try:
        try:
            pair.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode(errors='replace')}")
        yield pair
    finally:
        pair.delete()
