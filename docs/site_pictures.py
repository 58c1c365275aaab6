"""MkDocs hook: a click on a picture opens the picture in full size."""

import re


def on_page_content(html, page, config, files):
    """Link each picture that has no link to its file."""
    return re.sub(r'(<a [^>]*>)?(<img [^>]*src="([^"]+)"[^>]*>)', linked, html)


def linked(picture):
    return (
        picture[0] if picture[1] else f'<a href="{picture[3]}" title="full size">{picture[2]}</a>'
    )
