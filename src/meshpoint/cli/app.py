"""The commands, and the translation of their errors to messages and exit codes."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from meshpoint._version import __version__
from meshpoint.cli import (
    agents,
    checkpoints,
    dashboard,
    db,
    dead,
    doctor,
    exec,
    metrics,
    replicas,
    run,
    send,
    sessions,
    sources,
    tasks,
)
from meshpoint.cli.exits import ExitCode, describe_error, exit_code_for
from meshpoint.cli.output import print_error
from meshpoint.errors import ConfigurationError, MeshpointError
from meshpoint.model.error_text import describe_exception

log = logging.getLogger(__name__)

app = typer.Typer(
    name="meshpoint",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("run", epilog=run.RUN_EXAMPLES)(run.run)
app.command("send", epilog=send.EXAMPLES)(send.send)
app.command("exec", epilog=exec.EXAMPLES)(exec.exec_)
app.add_typer(sessions.app, name="sessions")
app.add_typer(tasks.app, name="tasks")
app.add_typer(agents.app, name="agents")
app.add_typer(replicas.app, name="replicas")
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(dead.app, name="dead")
app.add_typer(db.app, name="db")
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.doctor)
app.command("metrics", epilog=metrics.EXAMPLES)(metrics.metrics)
app.command("dashboard", epilog=dashboard.EXAMPLES)(dashboard.dashboard)
app.command("sweep", epilog=run.SWEEP_EXAMPLES)(run.sweep)

_DEMO_EXAMPLES = """\b
Examples:
  meshpoint demo                                  no server needed
  meshpoint demo --requests 50 --seed 7
  meshpoint demo --db postgresql://postgres@127.0.0.1/postgres        PostgreSQL is the broker too
  meshpoint demo --broker amqp://guest:guest@127.0.0.1/ --db postgresql://postgres@127.0.0.1/demo \
--json
"""


@app.command("demo", epilog=_DEMO_EXAMPLES)
def _demo(
    broker: sources.Broker = None,
    database: sources.Database = None,
    requests: Annotated[
        int, typer.Option("--requests", metavar="N", min=1, help="Number of requests to send.")
    ] = 24,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", help="Seed for the response times of the peers."),
    ] = None,
    as_json: sources.AsJson = False,
) -> None:
    """Kill replicas and watch every task get its answer.

    Starts three replicas, then kills one while a task is paused and one while a task runs.
    """
    from meshpoint.demo.run import run_demo

    raise typer.Exit(
        run_demo(broker_url=broker, db_url=database, requests=requests, seed=seed, as_json=as_json)
    )


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
        print_error(describe_error(error))
        sys.exit(exit_code_for(error))
    except (OSError, ValueError) as error:  # such as an unchecked path or setting
        log.debug("the command failed", exc_info=True)
        print_error(describe_exception(error))
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
            raise ConfigurationError(
                "the command line", problem, "encode all arguments as UTF-8"
            ) from error


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"meshpoint {__version__}")
        raise typer.Exit


@app.callback()
def _meshpoint(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Durable waiting for agents that call agents: pause in one replica, resume in any other.

    Exit codes: 0 success, 1 error, 2 configuration or command line, 3 database or broker
    unavailable, 4 task failed, 5 task cancelled, 6 no answer in time, 7 session in use by another
    process, 10 to 14 operation not resumed (not found, active, completed, no checkpoint, another
    operation of an exclusive agent active), 15 and 16 findings of doctor (warnings, errors), 130
    interrupted.
    """
