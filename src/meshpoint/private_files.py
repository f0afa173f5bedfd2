"""Files readable only by their owner: task data, messages, exports."""

from __future__ import annotations

import os
from pathlib import Path

_OWNER_ONLY = 0o600


def create_private(path: Path) -> bool:
    """Create an empty file at `path` with mode 0600. Returns `True` if it did not exist before.

    An existing file is left unchanged. A symbolic link is never followed to create its target:
    otherwise, another user could make this process create a file of their choice.

    Raises:
        FileExistsError: `path` is a dangling symbolic link.
        OSError: The file cannot be created.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        os.close(os.open(path, flags, _OWNER_ONLY))
    except FileExistsError:
        if path.is_symlink() and not path.exists():
            raise FileExistsError(f"{path} is a dangling symbolic link") from None
        return False
    return True
