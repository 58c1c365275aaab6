"""What `mkdocs build` needs beside the pages: the reports lie outside docs/, so that their links work in the repository too."""

from pathlib import Path

from mkdocs.structure.files import File

REPORTS = Path("outputs/report")


def on_files(files, config):
    """Adds the committed reports to the site, as report/."""
    root = Path(config.config_file_path).parent / REPORTS
    for path in sorted(root.iterdir()):
        files.append(File.generated(config, f"report/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links to outputs/report/ become links to the site's copies."""
    return markdown.replace(f"](../{REPORTS}/", "](report/")
