"""The version is the same wherever it is said."""

from pathlib import Path

from actorflow.environment.settings import __version__

ROOT = Path(__file__).resolve().parents[1]


def test_changelog_and_citation_say_the_version():
    headings = [
        line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line[:3] == "## "
    ]
    assert headings[0].split()[1] == __version__
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
