"""README.md and the pages of docs/, their fenced blocks, the files that a user adds, and the project's description."""

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
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
        section = part.partition("\n")[0]
        for head, text in re.findall(r"^```([^\n]*)\n(.*?)^```$", part, re.S | re.M):
            language = head.split(" ")[0]
            title = re.search(r'title="([^"]+)"', head)
            file = ""
            if title:
                file = title[1]
            yield Block(page, section, language, file, text)


BLOCKS = []
for page in PAGES:
    BLOCKS += blocks_of(page)
RECIPES = [block for block in BLOCKS if block.page.name == "add-your-own.md"]


def section(name: str, language: str) -> list[str]:
    """The blocks of a section of add-your-own.md that are no files."""
    texts = []
    for block in RECIPES:
        if block.section == name and block.language == language and not block.title:
            texts.append(block.text)
    return texts


def write_recipes(folder: Path, *sections: str) -> Path:
    """The files of add-your-own.md, or of these sections."""
    for block in RECIPES:
        if block.title and (not sections or block.section in sections):
            path = folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
    return folder


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
