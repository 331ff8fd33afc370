"""Compare what jobs computed in recorded runs of the tests.

    python tests/recorder/same_bits.py FOLDER [--near host-0]

`pytest --record FOLDER` leaves a folder for each device and seed there, such as cuda-7. Those of a
device must have the same bits: each result of each job, whatever the seed. A run that is killed at
any moment may have come further with one seed than with another: such results are counted apart.
With --near, such as --near host-0, numbers are compared with another device's, up to step 20.
Exits with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from itertools import chain
from pathlib import Path

import recorder

STEPS = 20
NEAR, NEAR_OF_BF16 = 1e-5, 2e-2


def late_alone(run):
    """Return the results of jobs on devices; those of a test on the host may bear the same name."""
    found = {k: {h: r for h, r in results.items() if r["is_late"]} for k, results in run.items()}
    return {key: results for key, results in found.items() if results}


def compare_bits(runs):
    """Return (keys that differ, keys in some runs only, number of keys) of runs on a device.

    A test is compared among the runs that have it.
    """
    keys = sorted({*chain(*runs)})
    tests = [{key[0] for key in run} for run in runs]
    differ, partly = [], []
    for key in keys:
        there = [run for run, own in zip(runs, tests, strict=True) if key[0] in own]
        found = [frozenset(run.get(key, ())) for run in there]
        most = max(found, key=len)
        if any(not hashes <= most for hashes in found):
            differ.append(key)
        elif any(hashes != most for hashes in found):
            partly.append(key)
    return differ, partly, len(keys)


def compare_numbers(run, others):
    """Return (worst relative distance by test, number of numbers) of two devices."""
    worst, count = {}, 0
    for key, by_hash in run.items():
        test, _, _, step = key
        if step > STEPS or key not in others:
            continue
        for result in by_hash.values():
            limit = NEAR if result["precision"] in ("", "fp32") else NEAR_OF_BF16
            for name, value in result["numbers"].items():
                if not math.isfinite(value):
                    continue
                expected = [r["numbers"].get(name, math.inf) for r in others[key].values()]
                away = min(abs(value - e) / max(abs(e), 1e-30) for e in expected)
                count += 1
                worst[test] = max(worst.get(test, 0.0), away / limit)
    return worst, count


def main():
    """Compare, and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--near")
    options = parser.parse_args()
    devices = {}
    for folder in sorted(path for path in options.folder.glob("*-*") if path.is_dir()):
        devices.setdefault(folder.name.rpartition("-")[0], []).append(folder)
    is_wrong = False
    for device, folders in devices.items():
        runs = [late_alone(recorder.read(folder)) for folder in folders]
        by_test = Counter(chain(*[{key[0] for key in found} for found in runs]))
        differ, partly, count = compare_bits(runs)
        whole = sum([number == len(runs) for number in by_test.values()])
        print(
            f"{device}: {len(runs)} seeds, {len(by_test)} tests with jobs there, {whole} of them"
            f" with every seed; {count} results, {len(partly)} not with every seed,"
            f" {len(differ)} differ"
        )
        for test, number in Counter(key[0] for key in partly).items():
            print(f"  not with every seed: {number} of {test}")
        for key in differ:
            print("  DIFFER:", *key)
        is_wrong |= bool(differ)
        if options.near and not options.near.startswith(f"{device}-"):
            worst, numbers = compare_numbers(runs[0], recorder.read(options.folder / options.near))
            far = {test: away for test, away in worst.items() if away > 1}
            print(f"  {numbers} numbers of {len(worst)} tests; {len(far)} tests beyond the limit")
            for test, away in sorted(far.items(), key=lambda pair: -pair[1]):
                print(f"  far: {away:.2g} times the limit, {test}")
    sys.exit(is_wrong)


if __name__ == "__main__":
    main()
