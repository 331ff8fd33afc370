"""What the site has beside docs/*.md: the API, the texts of errors, files that pages link to.

mkdocs calls the functions below; mkdocs.yml names this file. Pages link to files outside of docs/
as they lie in the repository. On the site each such file is a page in `repository/`, made of the
file itself: Markdown as it is, other texts as code.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from api_pages import ROOMS, api_page  # beside this file
from error_texts import errors_page
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)\s:#]+)(#[^)\s]*)?\)")
CODE = {".py": "python", ".yaml": "yaml", ".sbatch": "bash", ".json": "json"}
ELSEWHERE = re.compile(r"https://[^\"'`\s]*")
"""What the theme would load for pages that this site does not have: drawn diagrams, stars."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the API and of errors, and the files that pages link to."""
    pages = {f"api/{page}.md": api_page(room) for page, room in ROOMS.items()}
    pages["errors.md"] = errors_page()
    for path in linked_files():
        pages[site_uri(path)] = page_of(path)
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Return the text of a page whose links to files of the repository lead to pages here."""
    here = source_of(page.file.src_uri)

    def mapped(match: re.Match[str]) -> str:
        target = (here.parent / match[1]).resolve()
        if not target.is_file() or (target.suffix == ".md" and target.parent == here.parent):
            return match[0]
        found = os.path.relpath(site_uri(target), os.path.dirname(page.file.src_uri) or ".")
        return f"]({found}{match[2] or ''})"

    return LINK.sub(mapped, markdown) if here.is_file() else markdown


def on_post_build(config: Any) -> None:
    """Take the addresses of other hosts out of the theme's script."""
    for script in Path(config.site_dir).glob("assets/javascripts/bundle.*.js"):
        script.write_text(ELSEWHERE.sub("", script.read_text()))


def linked_files() -> list[Path]:
    """Return the files outside of docs/ that pages link to, and those that these link to."""
    left, found = sorted(DOCS.glob("*.md")), dict[Path, None]()
    while left:
        page = left.pop()
        targets = [(page.parent / link).resolve() for link, _ in LINK.findall(page.read_text())]
        for path in targets:
            if path.is_file() and not path.is_relative_to(DOCS) and path not in found:
                found[path] = None
                left += [path] if path.suffix == ".md" else []
    return list(found)


def site_uri(path: Path) -> str:
    """Return the source path on the site of a file of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    uri = f"repository/{path.relative_to(ROOT).as_posix()}"
    return uri if path.suffix in (".md", ".png") else f"{uri}.md"


def source_of(uri: str) -> Path:
    """Return the file of the repository that a page is made of; of others a path that is none."""
    inside = uri.removeprefix("repository/")
    return (ROOT if inside != uri else DOCS) / inside


def page_of(path: Path) -> str | bytes:
    """Return what the site has of a file outside of docs/."""
    if path.suffix == ".png":
        return path.read_bytes()
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    name = path.relative_to(ROOT).as_posix()
    return f"# {path.name}\n\n`{name}`\n\n`````{CODE.get(path.suffix, 'text')}\n{text}`````\n"
