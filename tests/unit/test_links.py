"""Links between pages lead somewhere: every relative link has its file, and every anchor its heading."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])
_LINK = re.compile(r"\]\(([^()\s]+)\)")


def prose_of(page: Path) -> str:
    """Return a page without its blocks of code, where brackets are not links and # is not a heading."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", prose_of(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


def broken_links(page: Path) -> Iterator[str]:
    for link in _LINK.findall(prose_of(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            yield f"{link}: no such file"
        elif anchor and target.suffix == ".md" and anchor not in anchors_of(target):
            yield f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# `A b`, c\n[x](#a-b-c) [x](page.md#a-b-c) [x](https://x.test/#y)\n```\n# no\n[x](no.md)\n```\n"
    )
    assert list(broken_links(page)) == []
    page.write_text("# A\n[x](#b) [x](none.md) [x](page.md#b)\n")
    assert list(broken_links(page)) == [
        "#b: no such heading",
        "none.md: no such file",
        "page.md#b: no such heading",
    ]


def test_the_readme_can_be_read_in_two_minutes() -> None:
    """It opens with the picture, and has fewer than 600 words, as `wc -w` counts them."""
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) < 600
    assert text.split("\n\n")[1].startswith("![")
