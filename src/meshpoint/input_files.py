"""Read files named by users, up to a size limit."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import IO

_MIB = 1024 * 1024


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Read `path`, which may be a pipe or a device.

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
