"""What the page on ranks shows of layouts runs as it stands."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ranks.md"


def test_the_page_shows_which_part_a_rank_has():
    (shown,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    exec(compile(shown, str(PAGE), "exec"), {"__name__": "__main__"})
