"""What a reader expects of a checkpoint: the variables of the job that is to go on from it.

The hashes of a checkpoint find damage. They cannot say that somebody who computed them again meant
what this job needs, so its manifest is held against the job before a byte of a tensor is reserved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from actorflow.checkpoint.errors import CheckpointUnfit
from actorflow.checkpoint.manifest import Manifest
from actorflow.checkpoint.shard import Array

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Expected:
    """The types of tensors that a checkpoint must have, and the names of those it may lack or have.

    A type is a text, such as "float32[2, 3]". `counter` names the tensor that counts the steps,
    which must say what the manifest says.
    """

    tensors: Mapping[str, str]
    optional: frozenset[str] = frozenset()
    counter: str = ""

    def check(self, manifest: Manifest) -> None:
        """Raise CheckpointUnfit when the tensors of a manifest are others."""
        found = {t.name: f"{t.dtype}{list(t.shape)}" for t in manifest.tensors}
        missing = [n for n in self.tensors if n not in found and n not in self.optional]
        unknown = [n for n in found if n not in self.tensors and n not in self.optional]
        if missing or unknown:
            raise CheckpointUnfit(
                f"it lacks {_listed(missing)} and has {_listed(unknown)} too many; another model"
                " or optimizer wrote it"
            )
        for name, expected in self.tensors.items():
            if found.get(name, expected) != expected:
                raise CheckpointUnfit(f"{name!r} is {found[name]} there, {expected} here")

    def check_values(self, manifest: Manifest, tensors: Mapping[str, Array]) -> None:
        """Raise CheckpointUnfit when the state is not that of the manifest's step."""
        if self.counter and int(tensors[self.counter]) != manifest.step:
            raise CheckpointUnfit(
                f"its {self.counter!r} is {int(tensors[self.counter])}, its name says"
                f" {manifest.step}"
            )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{[name[:200] for name in names[:_SHOWN]]}{more}" if names else "nothing"
