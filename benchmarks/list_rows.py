"""Print the rows as JSON: name, precision, items of a step, what they are, whether it is trained.

With the argument "cuda" also those that only a GPU is asked for.
"""

from __future__ import annotations

import json
import sys

from rows.all_rows import ALL_ROWS, GPU_ROWS

if __name__ == "__main__":
    rows = (*ALL_ROWS, *GPU_ROWS) if "cuda" in sys.argv[1:] else ALL_ROWS
    print(
        json.dumps(
            [(r.name, p, r.items, r.item, r.is_training) for r in rows for p in r.precisions]
        )
    )
