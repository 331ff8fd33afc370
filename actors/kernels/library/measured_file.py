"""Files that keep what was measured on this machine: small JSON objects under a seal.

Whoever finds one that is damaged measures anew.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from actors.kernels.native.sealed import DamagedFile, read_sealed, replace_sealed

T = TypeVar("T")

_report = logging.getLogger("actorflow").warning


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, None where there is nothing. Raises DamagedFile."""
    try:
        found: dict[str, Any] = json.loads(read_sealed(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DamagedFile(error.strerror or str(error)) from None
    return found


def kept(path: Path, decode: Callable[[dict[str, Any]], T], anew: str) -> T | None:
    """Return what `decode` makes of the object in a file; None where there is nothing of use.

    `decode` raises DamagedFile. A line says that a damaged file is not used, and what is measured
    `anew`.
    """
    try:
        found = read_object(path)
        return None if found is None else decode(found)
    except DamagedFile as error:
        report_damage(path, error, anew)
        return None


def replace_object(path: Path, values: dict[str, Any]) -> None:
    """Replace a file by a JSON object, so that no reader sees half of it; makes its folder private.

    Raises OSError, and leaves nothing behind then.
    """
    replace_sealed(path, json.dumps(values, indent=1, sort_keys=True).encode())


def report_damage(path: Path, error: DamagedFile, anew: str) -> None:
    """Say in one line that a file is not used, and what is measured anew."""
    _report("%s is damaged (%s) and not used: %s", path, error, anew)
