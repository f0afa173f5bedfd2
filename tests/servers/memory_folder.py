"""A folder in memory for the files of servers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil

_FOLDER = Path("/dev/shm")
_REQUIRED_BYTES = 8 * 2**30
"""Free memory in which the servers of several test processes certainly fit."""


def memory_folder() -> Path | None:
    """A large file system in memory, if the system has it and `TMPDIR` names no other folder.

    Files there outlive a killed server as they do on a disk, but a database is created sooner.
    """
    if os.environ.get("TMPDIR") or not os.access(_FOLDER, os.W_OK | os.X_OK):
        return None
    free = min(shutil.disk_usage(_FOLDER).free, psutil.virtual_memory().available)
    return _FOLDER if free >= _REQUIRED_BYTES else None
