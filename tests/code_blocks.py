"""Code blocks of a Markdown page."""

from __future__ import annotations

import re


def code_blocks(page: str, language: str) -> list[str]:
    """Unindented fenced blocks of `language` in `page`."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    return [str(block) for block in blocks]
