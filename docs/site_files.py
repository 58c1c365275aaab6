"""MkDocs hook: pages of results, the home page, and escaping of docstrings."""

import re
from pathlib import Path

import griffe
from mkdocs.structure.files import File

REPORTS = Path("outputs/report")
HOME = '<!doctype html><meta http-equiv="refresh" content="0; url=quickstart/"><a href="quickstart/">Quickstart</a>\n'


def on_files(files, config):
    """Add the pages of results as report/, and a home page that redirects to the quickstart."""
    root = Path(config.config_file_path).parent / REPORTS
    for path in sorted(filter(Path.is_file, root.iterdir())):
        files.append(File.generated(config, f"report/{path.name}", abs_src_path=str(path)))
    if files.get_file_from_path("index.md") is None:
        files.append(File.generated(config, "index.html", content=HOME))
    return files


def on_page_markdown(markdown, page, config, files):
    """Point links to outputs/report/ at the copies on the site."""
    return markdown.replace(f"](../{REPORTS}/", "](report/").replace("](../../docs/", "](../")


class PlainDocstrings(griffe.Extension):
    """Escape docstrings: E <phi(x), phi(y)> and (*batch, m, d) are neither HTML nor emphasis."""

    def on_instance(self, *, obj, **kwargs):
        if obj.docstring:
            obj.docstring.value = escaped(obj.docstring.value)


def escaped(text):
    """Escape <, * and _ for Markdown, except in backticks and in names of arguments, which the Google style parses."""
    prose, kept = (
        re.compile("([*_])"),
        re.compile(r"(`[^`]*`|^ +\*{0,2}\w+(?: \([^)\n]*\))?:)", re.M),
    )
    parts = (
        part if kept.match(part) else prose.sub(r"\\\1", part).replace("<", "&lt;")
        for part in kept.split(text)
    )
    return "".join(parts)
