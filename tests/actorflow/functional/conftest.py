"""Devices on which functions of a job are tried."""

import pytest


@pytest.fixture(params=["numpy", "native", "cuda"])
def device(request, monkeypatch):
    """Return the options of a job on a host with or without a compiler, or on an emulated GPU."""
    if request.param == "native":
        request.getfixturevalue("native")
    monkeypatch.setenv("ACTORFLOW_CUDA", "emulated")
    return {"device": "cuda", "gpu": "h200"} if request.param == "cuda" else {}
