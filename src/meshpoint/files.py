"""Private files, atomic writes, and bounded reads."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import IO

_OWNER_ONLY = 0o600
_MIB = 1024 * 1024


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


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` atomically: readers see either the old or the new content.

    Only the owner can read the file.
    """
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Read a file named by a user, which may be a pipe or a device.

    Raises:
        OSError: It cannot be read, or is larger than `max_bytes` bytes; `strerror` gives the
            reason.
    """
    try:
        with path.open("rb") as file:
            return read_stream(file, max_bytes)
    except ValueError as error:  # the name contains a NUL character
        raise OSError(errno.EINVAL, str(error)) from error


def read_stream(stream: IO[bytes], max_bytes: int) -> bytes:
    """Read `stream` to its end.

    Raises:
        OSError: It is larger than `max_bytes` bytes.
    """
    content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"has more than {max_bytes // _MIB} MiB")
    return content
