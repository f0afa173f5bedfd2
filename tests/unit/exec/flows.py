"""The flow that a test runs with `meshpoint exec`: a module in a folder of its own."""

from __future__ import annotations

from pathlib import Path

MODULE = "tested_flow"


def write_flow(folder: Path, source: str) -> None:
    """Replace the flow."""
    (folder / f"{MODULE}.py").write_text(source)


def read_effects(folder: Path) -> list[str]:
    """The steps that have run, in order. A flow writes each to the file `effects`."""
    return (folder / "effects").read_text().split()
