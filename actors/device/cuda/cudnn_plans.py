"""Plans that cuDNN has built, with the kernels it compiled for them, on disk.

An engine that compiles takes half a second for each graph: 40 s in front of the first steps of
ResNet-50 with the small library. A plan says all of it as bytes, which the frontend makes and
reads; whether the library has words for it depends on the engine. What it says is run, so a file
must be the user's own, and whole.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from actors.kernels.common.files import (
    KERNEL_BYTES,
    DamagedFile,
    distrust_of_file,
    distrust_of_folder,
    mark_used,
    prune_in_turn,
    read_checksummed,
    report_damage,
    write_checksummed,
)

_ANEW = "cuDNN builds its plan again"


@dataclass(frozen=True, slots=True)
class CudnnPlans:
    """Plans by a key, which says the graph and all else that decides the bytes of one.

    `folder` None: nothing is kept. A folder that cannot be read or written, or that others may
    write, costs the time and no more.
    """

    folder: Path | None

    def read(self, key: str) -> bytes | None:
        """Return the plan of a key; None where there is none of use, which the log then says."""
        path = self._file(key)
        if path is None or distrust_of_folder(path.parent) is not None:
            return None
        try:
            distrust = distrust_of_file(path)
            if distrust is not None:
                raise DamagedFile(distrust)
            plan = read_checksummed(path)
        except DamagedFile as error:
            report_damage(path, error, _ANEW)
            return None
        except OSError:
            return None
        mark_used(path)
        return plan

    def refuse(self, key: str, error: Exception) -> None:
        """Say that the library does not take what `read` returned."""
        path = self._file(key)
        if path is not None:
            report_damage(path, DamagedFile(f"{type(error).__name__}: {error}"), _ANEW)

    def keep(self, key: str, plan: bytes) -> None:
        """Keep a plan, in place of the one that is there."""
        path = self._file(key)
        if path is not None:
            with suppress(OSError):
                write_checksummed(path, plan)
                prune_in_turn(path, KERNEL_BYTES)

    def _file(self, key: str) -> Path | None:
        """Return the file of a key. The checksum covers its name, so no other fits."""
        name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        return None if self.folder is None else self.folder / f"{name}.cudnn"
