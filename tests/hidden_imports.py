"""Python processes in which some libraries appear to be missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection

_HIDE_MODULES_CODE = """\
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *rest):
        if any(f"{{name}}.".startswith(f"{{each}}.") for each in {hidden!r}):
            return None
        return self.finder.find_spec(name, *rest)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Hiding, sys.meta_path)
"""


def run_without(modules: Collection[str], code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in an interpreter that finds none of `modules`. Warnings are errors."""
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        _HIDE_MODULES_CODE.format(hidden=set(modules)) + code,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)
