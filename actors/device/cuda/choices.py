"""Which algorithms products were found to be fastest with, kept in a file for each library and GPU.

Likewise the number of the fastest of some ways to do the same, by what they do. A choice stands
once it is made: the same product has the same algorithm in every later run, and so the same bits.
Of two processes that measure at once, the first to keep is followed by the other.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from actors.kernels.library.measured_file import kept, replace_object
from actors.kernels.native.sealed import DamagedFile


@dataclass(slots=True)
class ProductChoices:
    """Algorithms by the key of a product. `folder` None: kept in this process alone.

    `made_for` is what they depend on besides: the version of the library, and the GPU's name.
    """

    folder: Path | None
    made_for: str
    known: dict[str, bytes] = field(default_factory=dict)

    @property
    def file(self) -> Path | None:
        """Where they are kept."""
        mark = hashlib.blake2b(self.made_for.encode(), digest_size=8).hexdigest()
        return None if self.folder is None else self.folder / f"products-{mark}.json"

    def get(self, key: str) -> bytes | None:
        """Return the algorithm that is kept for a product, if any; of ways, the number of one."""
        if key not in self.known:
            self.known |= self._read()
        return self.known.get(key)

    def keep(self, key: str, algorithm: bytes) -> bytes:
        """Keep an algorithm, and return the one to use: another process may have been first."""
        self.known = {**self.known, key: algorithm, **self._read()}
        if self.file is not None:
            found = {name: value.hex() for name, value in self.known.items()}
            with contextlib.suppress(OSError):  # a folder that cannot be written costs a trial
                replace_object(self.file, {"made_for": self.made_for, "products": found})
        return self.known[key]

    def _read(self) -> dict[str, bytes]:
        if self.file is None:
            return {}
        return kept(self.file, self._decoded, "products are timed anew") or {}

    def _decoded(self, found: dict[str, object]) -> dict[str, bytes]:
        products = found.get("products")
        if found.get("made_for") != self.made_for or not isinstance(products, dict):
            raise DamagedFile("it is for another library or GPU")
        try:
            return {str(name): bytes.fromhex(value) for name, value in products.items()}
        except (TypeError, ValueError) as error:
            raise DamagedFile(str(error)) from None
