"""A server of the dashboard in a process of its own, and Chromium to look at it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING
from urllib.request import urlopen

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
FLAGS = (
    "--no-sandbox",
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_START_SECONDS = 60


@contextmanager
def serving(config: Path, *options: str) -> Iterator[str]:
    """Run `meshpoint dashboard` on a free port while the block runs, and yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "meshpoint.cli", "dashboard", str(config)]
    server = subprocess.Popen([*command, "--port", str(port), *options])
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_until_healthy(address, server)
        yield address
    finally:
        server.terminate()
        server.wait()


def _wait_until_healthy(address: str, server: subprocess.Popen[bytes]) -> None:
    end = monotonic() + _START_SECONDS
    while monotonic() < end and server.poll() is None:
        try:
            with urlopen(f"{address}/healthz") as response:
                if response.status == 200:
                    return
        except OSError:
            sleep(0.1)
    raise SystemExit("the dashboard does not start")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run Chromium while the block runs."""
    from playwright.sync_api import sync_playwright

    if not Path(CHROMIUM).exists():
        raise SystemExit(f"{CHROMIUM} is missing; run: apt-get install -y chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


def file_name(text: str) -> str:
    """A name of a file for a page."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
