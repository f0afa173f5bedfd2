"""`meshpoint sweep`: one look for what time alone makes due, by hand."""

from __future__ import annotations

import asyncio
import sys

import typer

from meshpoint.cli import sources
from meshpoint.cli.output import print_json, print_table, print_text

EXAMPLES = """\b
Examples:
  meshpoint sweep travel.yaml
  meshpoint sweep travel.yaml --json
"""


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("sweep", epilog=EXAMPLES)(sweep)


def sweep(configs: sources.Configs, log_level: sources.LogLevel = "warning", as_json: sources.AsJson = False) -> None:
    """Do once what time alone makes due.

    Deadlines, expired leases, and what was committed and not sent; prints what was done.

    Running replicas do this by themselves; their work and this never collide.
    """
    from meshpoint.adapters.logging_observer import logging_to
    from meshpoint.wiring import sweep_once

    level, settings = sources.parse_log_level(log_level), sources.load_served_settings(configs)
    with logging_to(sys.stderr, level):
        done = asyncio.run(sweep_once(settings))
    if as_json:
        print_json(done)
    elif any(done.values()):
        print_table(("due", "done"), [(what, str(count)) for what, count in done.items() if count])
    else:
        print_text("nothing was due")
