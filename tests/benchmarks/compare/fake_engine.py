"""An engine that only pretends: arguments are loss, ms, log file, verb that fails, own name."""

import json
import sys

loss, ms, log, fails_at = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4]
for line in sys.stdin:
    ask = json.loads(line)
    with open(log, "a") as file:
        file.write(f"{sys.argv[5]} {ask['do']}\n")
    if ask["do"] == fails_at:
        print(json.dumps({"error": "ValueError: no such luck"}), flush=True)
        sys.exit(1)
    if fails_at == f"die:{ask['do']}":
        sys.exit("something broke")
    answers = {
        "first": {"loss": loss, "state_bytes": 1_000_000, "flops": 2e6, "settings": "made up"},
        "losses": {"losses": [loss] * ask.get("count", 0)},
        "run": {"ms": [ms] * ask.get("chunks", 0)},
        "gemm": {"fp32": {sys.argv[5]: 100.0}, "bf16": {sys.argv[5]: 300.0}},
        "quit": {"peak_rss": 9_000_000, "run_rss": 8_000_000, "base_rss": 3_000_000},
    }
    print(json.dumps(answers[ask["do"]]), flush=True)
