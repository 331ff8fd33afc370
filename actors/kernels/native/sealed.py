"""Files of a cache that end with a seal: a hash of their name and content, which finds accidents.

A file is written under a temporary name and renamed, so that two processes may write the same one.
Half a file, left by a full disk or a loss of power, would end the process with SIGBUS when it is
loaded as a library; one under another's name would be taken for that one. The seal is none of a
loader's business, and proves no author: see `trust`. Whoever finds a file that is not as it was
written makes it anew; nothing in it is worth an error.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from actors.kernels.native.trust import replace_file

_SEAL_BYTES = 16


class DamagedFile(ValueError):
    """What lies at the path is not what was written under its name; the message says why."""


def replace_sealed(path: Path, content: bytes) -> None:
    """Replace a file whole by some content under its seal; makes its folder private.

    Raises OSError, and leaves nothing else in the folder then.
    """
    replace_file(path, content + _seal(path.name, content))


def read_sealed(path: Path) -> bytes:
    """Return what `replace_sealed` wrote. Raises DamagedFile, or OSError where nothing is there."""
    # Non-blocking, for a pipe in its place would never be at its end.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise DamagedFile("it is no regular file")
        with open(fd, "rb", closefd=False) as file:
            whole = file.read()
    finally:
        os.close(fd)
    content = whole[:-_SEAL_BYTES]
    if whole[-_SEAL_BYTES:] != _seal(path.name, content):
        raise DamagedFile("its content does not match its hash")
    return content


def _seal(name: str, content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_SEAL_BYTES, key=name.encode()[:64]).digest()
