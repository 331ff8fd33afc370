"""What is known of a GPU before there is one: a file of numbers, so that plans need no GPU.

The files beside this one are all that is known. Rates are of the device as it is sold, or measured
where the file says so; the planner compares what they give, and a simulated step is made of them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from compiler.types import DType

_HERE = Path(__file__).parent

_NARROW_RATES = {1: 0.25, 2: 0.5, 4: 0.8}
"""The share of the rates of memory that neighbours reach who move so many bytes at a time; all of
it from 8 bytes on. An estimate: nobody has measured it on a card."""


def narrowness(access_bytes: int) -> float:
    """Return how many times as long bytes take of which a thread moves so many at a time."""
    return 1 / _NARROW_RATES.get(access_bytes, 1.0)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. `name` is what the user calls it, `says` what its driver calls it.

    `arch` is the one that kernels are compiled for ("sm_90a"), `capability` its number. A team of
    threads that meet without a barrier has `warp` of them. `bytes_per_ns` is of its own memory,
    read and written; `product_flops_per_ns` of products, by element type;
    `flops_per_ns` of what is no product, in float32. `call_ns` is what a kernel inside of a graph
    costs beside its work, `event_ns` a wait of one stream for another, and `link` what goes to the
    host and back.
    """

    name: str
    says: str
    arch: str
    capability: tuple[int, int]
    num_sms: int
    warp: int
    threads_per_sm: int
    shared_bytes: int
    memory_bytes: int
    l2_bytes: int
    bytes_per_ns: float
    l2_bytes_per_ns: float
    flops_per_ns: float
    product_flops_per_ns: Mapping[str, float]
    call_ns: float
    event_ns: float
    link_bytes_per_ns: float
    link_latency_ns: float

    def bytes_ns(self, size_bytes: float) -> float:
        """Return the time to move bytes, from the cache where they would fit into it."""
        rate = self.l2_bytes_per_ns if size_bytes <= self.l2_bytes / 2 else self.bytes_per_ns
        return size_bytes / rate

    def product_ns(self, dtype: DType, flops: float) -> float:
        """Return the time of products at the best rate of the library."""
        rates = self.product_flops_per_ns
        return flops / rates.get(dtype.value, rates["float32"])

    @property
    def fingerprint(self) -> str:
        """Everything that plans depend on."""
        return f"{self.name}-{self.arch}-{self.num_sms}"


def known_gpus() -> tuple[str, ...]:
    """Return the names of all GPUs that there is a description of, sorted."""
    return tuple(sorted([path.stem for path in _HERE.glob("*.json")]))


@functools.lru_cache(maxsize=16)
def gpu_named(name: str) -> Gpu:
    """Return the description of a GPU. Raises LookupError, which names those that there are."""
    known = known_gpus()
    if name not in known:
        raise LookupError(
            f"no GPU is called {name!r}; there are descriptions of {', '.join(known)}"
        )
    said = json.loads((_HERE / f"{name}.json").read_text(encoding="utf-8"))
    said["capability"] = tuple(said["capability"])
    return Gpu(**{field.name: said[field.name] for field in fields(Gpu)})
