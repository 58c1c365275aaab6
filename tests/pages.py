"""README.md and the pages of docs/, their fenced blocks, and the project's own description."""

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


class Block(NamedTuple):
    """A fenced block; `title` is the name of the file that it holds, where it is one, and `section` its ## heading."""

    page: Path
    section: str
    language: str
    title: str
    text: str


def blocks_of(page):
    for part in re.split(r"^## ", page.read_text(), flags=re.M):
        for head, text in re.findall(r"^```([^\n]*)\n(.*?)^```$", part, re.S | re.M):
            title = re.search(r'title="([^"]+)"', head)
            yield Block(page, part.partition("\n")[0], head.split(" ")[0], title[1] if title else "", text)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
