"""Files that a person names: read whole, and never more than fits."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import IO

_MIB = 1024 * 1024


def read_bounded(path: Path, most: int) -> bytes:
    """The content of `path`, which may be a pipe or a device.

    Raises:
        OSError: it cannot be read, or has more than `most` bytes; `strerror` says which.
    """
    try:
        with path.open("rb") as file:
            return _whole(file, most)
    except ValueError as error:  # a zero character in its name
        raise OSError(errno.EINVAL, str(error)) from error


def read_stream(stream: IO[bytes], most: int) -> bytes:
    """The rest of `stream`, up to its end.

    Raises:
        OSError: it has more than `most` bytes.
    """
    return _whole(stream, most)


def _whole(file: IO[bytes], most: int) -> bytes:
    content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"has more than {most // _MIB} MiB")
    return content
