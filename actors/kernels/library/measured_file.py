"""Files that keep what was measured on this machine: small JSON objects that are replaced whole.

They lie in a cache folder, where anything may have happened to them. Whoever finds one that is not
as it was written measures anew: nothing in such a file is worth an error.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

from actors.kernels.native.trust import replace_file

MAX_BYTES = 8 << 20

_report = logging.getLogger("actorflow").warning


class DamagedFile(ValueError):
    """What lies at the path is not a file of this kind; the message says why."""


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, None where there is nothing. Raises DamagedFile."""
    try:
        text = _text(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DamagedFile(error.strerror or str(error)) from None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"it is not JSON: {str(error)[:100]}") from None
    if not isinstance(found, dict):
        raise DamagedFile(f"it holds a {type(found).__name__}, not an object")
    return found


def _text(path: Path) -> bytes:
    # Non-blocking, for a pipe in its place would never be at its end.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedFile("it is no regular file")
        if status.st_size > MAX_BYTES:
            raise DamagedFile(f"it has {status.st_size:,} bytes, more than {MAX_BYTES:,}")
        return os.read(fd, MAX_BYTES)
    finally:
        os.close(fd)


def replace_object(path: Path, values: dict[str, Any]) -> None:
    """Replace a file by a JSON object, so that no reader sees half of it; makes its folder private.

    Raises OSError, and leaves nothing behind then.
    """
    replace_file(path, json.dumps(values, indent=1, sort_keys=True).encode())


def report_damage(path: Path, error: DamagedFile, what: str) -> None:
    """Say in one line that a file is not used, and what is measured anew."""
    _report("%s is damaged (%s) and not used: %s", path, error, what)
