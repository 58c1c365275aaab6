"""What `mkdocs build` needs beside the pages.

The reports lie outside docs/, so that links to them work in the repository too. Docstrings are plain text.
"""

import re
from pathlib import Path

import griffe
from mkdocs.structure.files import File

REPORTS = Path("outputs/report")


def on_files(files, config):
    """Adds the committed reports to the site, as report/."""
    root = Path(config.config_file_path).parent / REPORTS
    for path in sorted(filter(Path.is_file, root.iterdir())):
        files.append(File.generated(config, f"report/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links to outputs/report/ become links to the site's copies."""
    inner = markdown.replace(f"](../../{REPORTS}/", "](../report/")  # of pages in a folder, such as the gallery's
    inner = inner.replace("](../../docs/", "](../")
    return inner.replace(f"](../{REPORTS}/", "](report/")


class PlainDocstrings(griffe.Extension):
    """Formulas such as E <phi(x), phi(y)> and (*batch, m, d) are neither HTML nor emphasis."""

    def on_instance(self, *, obj, **kwargs):
        if obj.docstring:
            obj.docstring.value = escaped(obj.docstring.value)


def escaped(text):
    """The text with <, * and _ escaped for Markdown, but for what stands in backticks."""
    prose, code = re.compile("([*_])"), re.compile("(`[^`]*`)")
    parts = (part if code.match(part) else prose.sub(r"\\\1", part).replace("<", "&lt;") for part in code.split(text))
    return "".join(parts)
