"""`meshpoint doctor`: say what a deploy would do."""

from __future__ import annotations

import asyncio
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshpoint._version import __version__
from meshpoint.cli import sources
from meshpoint.cli.exits import ExitCode
from meshpoint.cli.output import console, print_json, show_progress
from meshpoint.cli.run import load_agents
from meshpoint.model.error_text import escape_unprintable, quantity

if TYPE_CHECKING:
    from meshpoint.doctor.findings import Finding

EXAMPLES = """\b
Examples:
  meshpoint doctor travel.yaml
  meshpoint doctor travel.yaml flights.yaml --json
  meshpoint doctor travel.yaml || test $? -eq 15    in a pipeline that accepts warnings
  meshpoint doctor travel.yaml --db postgresql://mesh@db/mesh --remove-marker travel
"""
_STYLES = {"error": "bold red", "unavailable": "bold red", "warning": "yellow", "note": "cyan"}
_NOUNS = {"error": "error", "unavailable": "missing check", "warning": "warning", "note": "note"}
_CODES = {
    "error": ExitCode.UNDEPLOYABLE,
    "unavailable": ExitCode.UNAVAILABLE,
    "warning": ExitCode.WARNINGS,
    "note": ExitCode.OK,
}


def doctor(
    configs: Annotated[
        list[Path],
        typer.Argument(metavar="CONFIG...", help="YAML files; the agents of all files are used."),
    ],
    *,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=0.1,
            max=3600,
            help="Limit for each request to a server.",
        ),
    ] = 10,
    database: Annotated[
        str | None,
        typer.Option(
            "--db", metavar="URL", help="Another database whose tasks to count: the former one."
        ),
    ] = None,
    remove_marker: Annotated[
        str | None,
        typer.Option(
            "--remove-marker",
            metavar="AGENT",
            help="Remove the agent's database marker if no replica and no task is left.",
        ),
    ] = None,
    as_json: sources.AsJson = False,
) -> None:
    """Say what a deploy of this configuration would do to running and waiting tasks.

    Run it with the code and the configuration of the new release, before you replace the first
    replica. It reads the database, the broker and Redis, and changes nothing except with
    --remove-marker. Each line has the cause and the fix.

    Exit codes: 0 nothing but notes; 15 warnings: some tasks would wait for something that this
    deploy does not bring, or a server should be corrected; 3 a server does not answer, so that
    checks are missing; 16 errors: do not deploy. A wrong configuration is one line and exit
    code 2.
    """
    from meshpoint.doctor.examine import examine
    from meshpoint.doctor.findings import CONFIG, worst
    from meshpoint.model.messages import validate_agent_name
    from meshpoint.settings import StoreSettings

    settings = load_agents(configs)
    others = [] if database is None else [StoreSettings.at(database, key="--db")]
    agent = None if remove_marker is None else validate_agent_name(remove_marker)
    with show_progress("loading the agents …") as show:
        findings = asyncio.run(
            examine(
                settings,
                timeout=timedelta(seconds=timeout),
                others=others,
                on_step=lambda step: show(f"reading {step} …"),
                remove_marker=agent,
            )
        )
    if len(configs) == 1:  # commands in the fixes run as printed
        file = shlex.quote(str(configs[0]))
        findings = [replace(each, fix=each.fix.replace(CONFIG, file)) for each in findings]
    code = _CODES[worst(findings).value]
    if as_json:
        print_json(
            {
                "release": __version__,
                "configs": [str(config) for config in configs],
                "verdict": "ok" if code is ExitCode.OK else worst(findings).value,
                "exit_code": int(code),
                "findings": [asdict(finding) for finding in findings],
            }
        )
    else:
        _print_findings(findings)
    raise typer.Exit(code)


def _print_findings(findings: Sequence[Finding]) -> None:
    from rich.text import Text

    out = console()
    for finding in findings:
        fix = f"; {finding.fix}" if finding.fix else ""
        text = f"{finding.subject}: {finding.problem}{fix}"
        line = Text.assemble(
            (f"{finding.severity.value:<11}", _STYLES[finding.severity.value]),
            " ",
            escape_unprintable(text),
        )
        out.print(line, soft_wrap=True)
    counts = Counter(finding.severity.value for finding in findings)
    parts = [quantity(counts[name], noun) for name, noun in _NOUNS.items() if counts[name]]
    out.print(", ".join(parts) or "no findings", soft_wrap=True)
