"""`meshpoint sweep`: run one sweep manually."""

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
    """Run one sweep and print what it did.

    A sweep enforces deadlines, handles expired leases and sends committed messages that are still
    unsent.

    Running replicas sweep by themselves; a manual sweep does not conflict with theirs.
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
