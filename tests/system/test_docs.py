"""What the pages generate from the code is what the code says."""

from pathlib import Path

import pytest

from actors.machine.transitions import Message, state_diagram, transition_table

PAGE = Path(__file__).parents[2] / "docs" / "actors.md"


def section(name):
    text = PAGE.read_text()
    _, _, rest = text.partition(f"<!-- {name} -->\n")
    return rest.partition("<!-- end -->")[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("state_diagram", lambda: f"```mermaid\n{state_diagram()}```\n"),
        ("transition_table", transition_table),
    ],
)
def test_the_page_on_actors_shows_the_protocol_that_the_machine_obeys(name, expected):
    assert section(name) == expected()


def test_the_page_on_actors_explains_every_message():
    text = PAGE.read_text()
    for kind in Message:
        assert f"| {kind.name} |" in text
