"""`make dashboard-check`: the dashboard in Chromium, with axe-core and 100,000 tasks."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from dashboard.browser import chromium, serving
from dashboard.bulk import fill
from dashboard.checks import check_actions, check_axe, check_live, check_roles, take_pictures
from dashboard.day import Day, write_day
from dashboard.scene import write_config, write_letters
from dashboard.timing import measure

TOKENS = "ada operate aaaaaaaaaaaaaaaaaaaaaaaa\nbob view bbbbbbbbbbbbbbbbbbbbbbbbbbbb\n"


async def write(folder: Path) -> Day:
    """Write a day of the scene and its dead letters."""
    day = await write_day(f"sqlite:///{folder}/mesh.db", datetime.now(UTC))
    await write_letters(folder / "mesh-queues.db", ["not JSON"] * 3 + ["delivery limit"])
    return day


def main() -> None:
    """Run all checks, and exit with 1 if one fails."""
    parser = argparse.ArgumentParser(prog="dashboard")
    parser.add_argument("--axe", type=Path, help="axe.min.js of axe-core")
    parser.add_argument("--pictures", type=Path, default=Path(".cache/dashboard"))
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--db", help="an empty database for the tasks, instead of a SQLite file")
    parser.add_argument("--only", choices=["pictures", "actions", "axe", "tasks"], action="append")
    options = parser.parse_args()
    chosen = options.only or ["pictures", "axe", "actions", "tasks"]
    problems: list[str] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config, day = write_config(folder), asyncio.run(write(folder))
        large = folder / "large"
        large.mkdir()
        if "tasks" in chosen:  # first, since Playwright keeps an event loop
            asyncio.run(fill(options.db or f"sqlite:///{large}/mesh.db", options.tasks))
        if {"pictures", "axe", "actions"} & set(chosen):
            browser = stack.enter_context(chromium())
            address = stack.enter_context(serving(config))
            if "pictures" in chosen:
                take_pictures(browser, address, day, options.pictures)
            if "axe" in chosen:
                problems += check_axe(browser, address, day, options.axe)
            if "actions" in chosen:
                tokens = folder / "tokens"
                tokens.write_text(TOKENS)
                tokens.chmod(0o600)
                guarded = stack.enter_context(serving(config, "--tokens", str(tokens)))
                problems += check_roles(browser, guarded, day.scene)
                problems += check_live(browser, address, folder)
                problems += check_actions(browser, address, day.scene)
        if "tasks" in chosen:
            config = write_config(large, options.db)
            problems += measure(stack.enter_context(serving(config)), options.tasks)
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
