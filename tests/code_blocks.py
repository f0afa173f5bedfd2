"""The code on a page of Markdown."""

from __future__ import annotations

import re


def code_blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of `language` in `page` that begin at the margin."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    return [str(block) for block in found]
