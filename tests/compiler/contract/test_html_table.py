from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from compiler.contract.html_table import html_table


class Page(HTMLParser):
    """What a browser makes of a text: elements, and the letters in each cell."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.cells = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        assert attributes == []
        self.tags.append(tag)
        if tag in ("caption", "th", "td"):
            self.cells.append("")

    def handle_data(self, data):
        self.cells[-1] += data


@given(
    st.text(max_size=20),
    st.dictionaries(st.text(max_size=20), st.text(max_size=30) | st.floats(), max_size=4),
)
def test_all_texts_are_text_whatever_they_say(title, rows):
    page = Page(html_table(title, rows))
    assert page.tags == ["table", "caption", *["tr", "th", "td"] * len(rows)]
    assert page.cells == [title, *[str(one) for row in rows.items() for one in row]]


def test_markup_in_names_does_nothing():
    page = Page(html_table("<script>", {"<img src=x onerror=y>": '"&amp;'}))
    assert page.tags == ["table", "caption", "tr", "th", "td"]
    assert page.cells == ["<script>", "<img src=x onerror=y>", '"&amp;']


def test_numbers_are_grouped_and_long_texts_are_cut():
    page = Page(html_table("t", {"n": 1234567, "is": True, "long": "x" * 10_000}))
    assert page.cells[2] == "1,234,567"
    assert page.cells[4] == "True"
    assert len(page.cells[6]) < 500
