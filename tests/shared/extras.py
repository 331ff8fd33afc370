"""Packages of extras that a test needs."""

from importlib.metadata import PackageNotFoundError, version

import pytest


def need_mpi():
    """Skip a test where the extra [mpi] is absent."""
    for package in ("mpi4py", "mpich"):
        try:
            version(package)
        except PackageNotFoundError:
            pytest.skip(f"needs {package}, of the extra [mpi]")
