"""Extraction of the final answer from a response."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"(?P<box>\\(?:boxed|fbox|box)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""The stripped content of the complete ``\boxed{..}`` (``\fbox``, ``\box``) that begins last, or None without one.

    Braces are matched, escaped ones (``\{``) are literal, and a box that is never closed does not count. Of nested
    boxes the inner one wins. One pass over the text, so a degenerate response cannot stall the caller.
    """
    open_braces: list[int | None] = []
    """Where the content of each open box begins; None for a plain brace."""
    best: tuple[int, int] | None = None
    for token in _TOKEN.finditer(text):
        if token["box"]:
            open_braces.append(token.end())
        elif token["open"]:
            open_braces.append(None)
        elif token["close"] and open_braces:
            begin = open_braces.pop()
            if begin is not None and (best is None or begin > best[0]):
                best = (begin, token.start())
    return None if best is None else text[best[0] : best[1]].strip()
