"""The command-line reference page matches the commands."""

from __future__ import annotations

from pathlib import Path

from meshpoint.cli.reference import render_page

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "cli.md"


def test_the_reference_page_lists_every_command() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == render_page(page), (
        "run: python -m meshpoint.cli.reference docs/reference/cli.md"
    )
