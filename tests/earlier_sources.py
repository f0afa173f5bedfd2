"""Sources of earlier releases, from the history of this repository."""

from __future__ import annotations

import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def extract_release(commit: str, folder: Path, *paths: str) -> Path | None:
    """Write `paths` of a commit to `folder`, and return it. `None` if the history is not here."""
    command = ["git", "-C", str(_ROOT), "archive", commit, *paths]
    archived = subprocess.run(command, capture_output=True, check=False)
    if archived.returncode:
        return None
    with tarfile.open(fileobj=BytesIO(archived.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder
