"""onnxruntime and OpenVINO, at their best for one request at a time: all cores, all rewrites.

They read what actorflow exports, so they run inference alone; the outputs are compared as those of
every engine are. Products stay in float32, also where OpenVINO would choose bfloat16.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from rows.row import Row

from engines.serve import mean_square, num_threads, round_robin, serve

Call = Callable[[dict[str, np.ndarray]], np.ndarray]


def onnxruntime(file: Path) -> tuple[Call, str]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads()
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    settings = f"onnxruntime {ort.__version__}, all rewrites, {num_threads()} threads"
    return lambda batch: session.run(None, batch)[0], settings


def openvino(file: Path) -> tuple[Call, str]:
    import openvino as ov

    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": num_threads(),
    }
    core = ov.Core()
    request = core.compile_model(core.read_model(file), "CPU", options).create_infer_request()
    settings = f"openvino {ov.__version__}, latency hint, f32, {num_threads()} threads"
    return lambda batch: request.infer(batch, share_inputs=True, share_outputs=True)[0], settings


RUNTIMES = {"session": onnxruntime, "latency": openvino}
"""By the variants of the two engines."""


def exported(row: Row) -> Path:
    """Return the file of a row, which is written where it is not in the cache."""
    checksum = 0
    for name, array in row.weights().items():
        checksum = zlib.crc32(array, zlib.crc32(name.encode(), checksum))
    file = Path(os.environ["BENCH_ONNX"]) / f"{row.name}-{checksum:08x}.onnx"
    if not file.exists():
        script = str(Path(__file__).with_name("export_onnx.py"))
        command = [sys.executable, script, row.name, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"no export of {row.name}: {done.stderr.strip()[-500:]}")
    return file


@dataclass(slots=True)
class Session:
    call: Call
    next_batch: Callable[[], dict[str, np.ndarray]]
    settings: str

    def step(self) -> float:
        return mean_square(self.call(self.next_batch()))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.call(self.next_batch())

    def describe(self) -> dict[str, object]:
        return {"settings": self.settings}


class OnnxRuntimes:
    def prepare(self, row: Row, precision: str, variant: str, device: str) -> Session:
        if row.is_training or precision != "fp32" or device != "host":
            raise ValueError(f"expected an inference in fp32 on the host, got {row.name}")
        call, settings = RUNTIMES[variant](exported(row))
        batches = [{n: a for n, a in batch.items() if n != "y"} for batch in row.batches()]
        return Session(call, round_robin(batches), settings)

    def gemm(self, precision: str) -> dict[str, Callable[[], object]]:
        return {}


if __name__ == "__main__":
    serve(OnnxRuntimes)
