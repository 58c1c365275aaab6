"""What a user adds: the files of docs/add-your-own.md in a folder."""

from pathlib import Path

from pages import BLOCKS

RECIPES = [block for block in BLOCKS if block.page.name == "add-your-own.md"]


def section(name: str, language: str) -> list[str]:
    """The blocks of a section that are no files."""
    return [block.text for block in RECIPES if (block.section, block.language, block.title) == (name, language, "")]


def write_recipes(folder: Path, *names: str) -> Path:
    """The files of these sections."""
    for block in RECIPES:
        if block.title and block.section in names:
            path = folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
    return folder
