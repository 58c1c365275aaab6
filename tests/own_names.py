"""What a user adds: the files of docs/add-your-own.md in a folder, and made-up packages with entry points."""

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


def write_package(site: Path, name: str, entries: str, files: dict[str, str]) -> Path:
    """As pip leaves it: the package and its dist-info."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[crt_exp.mechanisms]\n{entries}\n")
    for place, text in ({"__init__.py": ""} | files).items():
        path = site / name / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return site
