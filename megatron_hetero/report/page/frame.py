"""What all pages share: the document around a page, headings, figures wider than a screen."""

from __future__ import annotations

from html import escape

from megatron_hetero.report.page.figure import Figure, asset, style


def framed(title: str, body: str) -> str:
    """Return a whole document with the styles and the script of pages inside.

    Args:
        title: of the document, as plain text.
        body: HTML of the document.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>\n{style()}{asset('page.css')}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n<script>\n{asset('page.js')}</script>\n</body>\n</html>\n"
    )


def section(title: str, hint: str) -> str:
    """Return a heading, with a line below that says what the section shows."""
    return f'<h2>{escape(title)}</h2>\n<p class="hint">{escape(hint)}</p>'


def scrolled(figure: Figure) -> str:
    """Return a figure that narrow screens move sideways."""
    # Smaller than that its words could not be read; on a narrow screen it is moved sideways.
    return (
        '<p class="wide">the figure is wider than the screen: move it sideways &rarr;</p>'
        f'<div class="scroll" tabindex="0">{figure.inline()}</div>'
    )
