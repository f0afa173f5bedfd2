"""The command line. Commands import their dependencies when they run, to keep `--help` fast."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from meshpoint import extras
from meshpoint.cli.exits import describe_error, exit_code_for
from meshpoint.errors import ConfigurationError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit. Without the extra `cli`, print how to install it."""
    try:
        extras.COMMAND_LINE.require("meshpoint")
    except ConfigurationError as error:
        print(f"error: {describe_error(error)}", file=sys.stderr)
        sys.exit(exit_code_for(error))
    from meshpoint.cli.app import main as run

    run(arguments)
