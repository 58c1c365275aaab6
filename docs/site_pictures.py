"""Pictures of the site open in full size when they are clicked: on a telephone they are small."""

import re


def on_page_content(html, page, config, files):
    """A picture that is no link yet becomes one to itself."""
    return re.sub(r'(<a [^>]*>)?(<img [^>]*src="([^"]+)"[^>]*>)', linked, html)


def linked(picture):
    return picture[0] if picture[1] else f'<a href="{picture[3]}" title="full size">{picture[2]}</a>'
