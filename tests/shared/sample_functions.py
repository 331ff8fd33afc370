"""Functions on samples that worker processes import."""

import os
import signal
import time
from pathlib import Path

import numpy as np


def noisy(sample, rng):
    """Add random numbers to a sample."""
    return {"n": sample["n"], "r": rng.random(3)}


def is_kept(sample):
    """Whether a filter keeps a sample."""
    return sample["n"] % 3 != 0


def words(sample):
    """Return ids that tell the number of their sample and their place in it."""
    n = int(sample["n"])
    return {"ids": (100 * n + np.arange(1 + n * 7 % 9)).astype(np.int32)}


def mixed(batch, rng):
    """Blend a batch with itself, as mixup does."""
    share = rng.random()
    return {"n": batch["n"], "r": share * batch["r"] + (1 - share) * batch["r"][::-1]}


def broken(sample):
    """Raise for one sample."""
    if sample["n"] == 13:
        raise ValueError("unlucky")
    return {"n": sample["n"], "r": np.zeros(3)}


def dies_once(sample):
    """Kill the worker over one sample, unless the file that it leaves is there."""
    mark = Path(os.environ["MARK_OF_DEATH"])
    if sample["n"] == 13 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"n": sample["n"], "r": np.zeros(3)}


def dies(sample):
    """Kill the worker over one sample, each time."""
    if sample["n"] == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def never_returns(sample):
    """Take for ever over one sample."""
    while sample["n"] == 13:
        time.sleep(0.01)  # a function of the user's that hangs
    return sample
