"""Print the rows of the comparison as JSON: name, precision, items of a step, what an item is."""

from __future__ import annotations

import json

from rows.all_rows import ALL_ROWS

if __name__ == "__main__":
    print(json.dumps([(r.name, p, r.items, r.item) for r in ALL_ROWS for p in r.precisions]))
