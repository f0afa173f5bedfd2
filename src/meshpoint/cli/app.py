"""The commands, and the translation of their errors to messages and exit codes."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from meshpoint._version import __version__
from meshpoint.cli import checkpoints, db, demo, exec, run, send, sessions, sweep, tasks
from meshpoint.cli.exits import ExitCode, describe_error, exit_code_for
from meshpoint.errors import ConfigurationError, MeshpointError
from meshpoint.model.error_text import described

log = logging.getLogger(__name__)

app = typer.Typer(
    name="meshpoint",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
run.register(app)
send.register(app)
exec.register(app)
app.add_typer(sessions.app, name="sessions")
app.add_typer(tasks.app, name="tasks")
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(db.app, name="db")
sweep.register(app)
demo.register(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with an `ExitCode`. An error is one line on standard error."""
    # Some libraries log an error and also raise it: print it once. `run` adds its own handler.
    logging.getLogger().addHandler(logging.NullHandler())
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # escape unencodable text
    try:
        _check_encoding(sys.argv[1:] if arguments is None else arguments)
        app(args=arguments)
    except MeshpointError as error:
        from meshpoint.cli.output import print_error

        print_error(describe_error(error))
        sys.exit(exit_code_for(error))
    except (OSError, ValueError) as error:  # such as an unchecked path or setting
        from meshpoint.cli.output import print_error

        log.debug("the command failed", exc_info=True)
        print_error(described(error))
        sys.exit(ExitCode.ERROR)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)


def _check_encoding(arguments: Sequence[str]) -> None:
    """Reject arguments that are not UTF-8: servers, logs and terminals would fail later."""
    for each in arguments:
        try:
            each.encode()
        except UnicodeEncodeError as error:
            problem = f"{each[:100]!r} is not UTF-8 text"
            raise ConfigurationError("the command line", problem, "encode all arguments as UTF-8") from error


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"meshpoint {__version__}")
        raise typer.Exit


@app.callback()
def _meshpoint(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Durable waiting for agents that call agents: pause in one replica, resume in any other.

    Exit codes: 0 success, 1 error, 2 configuration or command line, 3 database or broker
    unavailable, 4 task failed, 5 task cancelled, 6 no answer in time, 7 session in use by another
    process, 10 to 14 operation not resumed (not found, active, completed, no checkpoint, another
    operation of an exclusive agent active), 130 interrupted.
    """
