"""Exit codes, for scripts."""

from __future__ import annotations

from enum import IntEnum

from meshpoint.errors import ConfigurationError, MeshpointError, Unavailable


class ExitCode(IntEnum):
    """How a command ended."""

    OK = 0
    ERROR = 1
    CONFIGURATION = 2  # also a command line that cannot be read
    UNAVAILABLE = 3  # the database or the broker is away
    FAILED = 4  # the task failed
    CANCELLED = 5  # the task was cancelled
    NO_ANSWER = 6  # no answer in time; the task may still end
    INTERRUPTED = 130


def code_of(error: MeshpointError) -> ExitCode:
    """The exit code for `error`."""
    match error:
        case ConfigurationError():
            return ExitCode.CONFIGURATION
        case Unavailable():
            return ExitCode.UNAVAILABLE
        case _:
            return ExitCode.ERROR
