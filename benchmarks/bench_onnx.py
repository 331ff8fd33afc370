"""ONNX's own cases of single nodes, and models that are exported, run by onnxruntime and read back.

python benchmarks/bench_onnx.py cases     right, wrong and refused, of the core and of all others
python benchmarks/bench_onnx.py models    the largest difference to onnxruntime, by model
python benchmarks/bench_onnx.py light     models of the onnx package's own test data
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
from onnx.backend.test.runner import BackendIsNotSupposedToImplementIt, Runner, _normalize_tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "shared"), str(ROOT)]

import actorflow as af  # noqa: E402  # of this checkout
from actorflow.onnx import backend  # noqa: E402


def cases(names):
    from onnx.backend.test.loader import load_model_tests
    from onnx_models import is_core_case

    warnings.simplefilter("ignore")  # the cases overflow and divide by zero on purpose
    counts, begin = {True: Counter(), False: Counter()}, time.perf_counter()
    for case in load_model_tests(kind="node"):
        if "_expanded" in case.name or len(case.model.graph.node) != 1:
            continue
        verdict = "right"
        try:
            prepared = backend.prepare(case.model)
            for inputs, outputs in case.data_sets:
                made = prepared.run([_normalize_tensor(x) for x in inputs])
                expected = [_normalize_tensor(x) for x in outputs]
                Runner.assert_similar_outputs(expected, made, case.rtol, case.atol)
        except BackendIsNotSupposedToImplementIt as refusal:
            verdict = "refused"
            if is_core_case(case):
                print(f"refused: {case.name}: {refusal}")
        except Exception as error:
            verdict = "wrong"
            print(f"wrong: {case.name}: {error}")
        counts[is_core_case(case)][verdict] += 1
    print(f"core: {dict(counts[True])}; others: {dict(counts[False])};", end=" ")
    print(f"{time.perf_counter() - begin:.0f} s")


def drawn(rng, shape, ids, rows):
    """Return a batch of so many rows: of ids below a number, or of floats."""
    whole = (rows, *shape)
    return rng.integers(0, ids, whole) if ids else rng.normal(size=whole).astype(np.float32)


def models(names):
    from models.bert import BertForMaskedLM
    from models.gpt2 import GPT2
    from models.lenet import LeNet5
    from models.lstm_lm import LSTMLanguageModel
    from models.resnet import resnet50
    from models.vit import VisionTransformer
    from onnx_models import run_by_onnxruntime

    vit = {"size": 64, "patch": 8, "dim": 64, "depth": 4, "heads": 4}
    table = {
        "lenet": (LeNet5, (1, 28, 28), 0),
        "resnet50": (lambda: resnet50(1000), (3, 64, 64), 0),
        "vit": (lambda: VisionTransformer(10, **vit), (3, 64, 64), 0),
        "gpt2": (lambda: GPT2(1000, 64, 128, 4, 4), (32,), 1000),
        "bert": (lambda: BertForMaskedLM(1000, 64, 128, 4, 4), (32,), 1000),
        "lstm": (lambda: LSTMLanguageModel(1000, 64, 128), (32,), 1000),
    }
    for name in names or table:
        make, shape, ids = table[name]
        model, rng = make(), np.random.default_rng(0)
        job = af.job(train=False, max_plans=20)(lambda model, batch: model(batch.x))
        draw = functools.partial(drawn, rng, shape, ids)
        with tempfile.TemporaryDirectory() as folder:
            for opset in (17, 20, 23):
                path = Path(folder) / f"{opset}.onnx"
                axes = {"x": {0: "batch"}}
                af.onnx.export(job, model, {"x": draw(3)}, path, opset=opset, dynamic_axes=axes)
                onnx.checker.check_model(str(path), full_check=True)
                given = [{"x": draw(n)} for n in (1, 2, 7)]
                theirs = run_by_onnxruntime(path, given, Path(folder))
                ours = [job.step(model, batch)["output"] for batch in given]
                pairs = zip(ours, theirs, strict=True)
                apart = [np.abs(made["output"] - own).max() for own, made in pairs]
                most = max(float(np.abs(own).max()) for own in ours)
                read = af.onnx.load(path)
                back = job.step(read, given[0])["output"] - job.step(model, given[0])["output"]
                nodes = len(onnx.load(path).graph.node)
                apart, back = f"{max(apart):.1e} of {most:.1f}", f"{np.abs(back).max():.1e}"
                print(f"{name:9} opset {opset}: {nodes:4} nodes,", end=" ")
                print(f"onnxruntime differs by {apart}, what was read back by {back}", flush=True)


def light(names):
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    for name in names or ("squeezenet", "resnet50", "densenet121", "inception_v1", "shufflenet"):
        begin = time.perf_counter()
        model = af.onnx.load(folder / f"light_{name}.onnx")
        shape = (1, 3, 224, 224)
        x = (np.arange(np.prod(shape)).reshape(shape) / np.prod(shape)).astype(np.float32)
        job = af.job(train=False)(lambda model, batch: model(batch))
        made = job.step(model, {model.inputs[0]: x})["output"]
        stored = onnx.TensorProto()
        stored.ParseFromString((folder / f"light_{name}_output_0.pb").read_bytes())
        apart = np.abs(made - onnx.numpy_helper.to_array(stored)).max()
        print(f"{name:13} differs by {apart:.1e}; {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["cases", "models", "light"])
    parser.add_argument("names", nargs="*", help="of models; all by default")
    options = parser.parse_args()
    {"cases": cases, "models": models, "light": light}[options.what](options.names)
