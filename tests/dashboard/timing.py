"""How long the server takes for each page."""

from __future__ import annotations

import re
from html import unescape
from statistics import median
from time import monotonic
from urllib.parse import quote
from urllib.request import urlopen

from dashboard.scene import NAMESPACE

MAX_MILLISECONDS = 300.0
_REPEATS = 7
_MAX_PAGES = 40
"""Pages that are followed to the middle of a listing."""


def read(url: str) -> str:
    """The body of a page."""
    with urlopen(url) as response:
        body: bytes = response.read()
    return body.decode()


def follow(address: str, path: str) -> str:
    """The address of a page deep in a listing."""
    for _ in range(_MAX_PAGES):
        found = re.search(r'href="([^"]+)" rel="next"', read(address + path))
        if found is None:
            break
        path = unescape(found[1])
    return path


def measure(address: str, count: int) -> list[str]:
    """Measure each page, and return the slow pages."""
    mesh = f"/m/{NAMESPACE}"
    listed = read(f"{address}{mesh}/waiting")
    ids = [unescape(each) for each in re.findall(r'class="id" [^>]*title="([^"]+)"', listed)]
    paths = {
        "waiting": f"{mesh}/waiting",
        "waiting, page 41": follow(address, f"{mesh}/waiting"),
        "waiting of an agent": f"{mesh}/waiting?agent=travel",
        "waiting tasks": f"{mesh}/tasks?state=waiting",
        "waiting tasks, page 41": follow(address, f"{mesh}/tasks?state=waiting"),
        "waiting tasks of an agent": f"{mesh}/tasks?state=waiting&agent=travel",
        "running tasks": f"{mesh}/tasks?state=running",
        "parked tasks of an agent": f"{mesh}/tasks?state=parked&agent=travel",
        "questions": f"{mesh}/questions",
        "questions, page 41": follow(address, f"{mesh}/questions"),
        "task": f"{mesh}/task?id={quote(ids[0])}",
        "failures": f"{mesh}/failures",
        "failures of an agent": f"{mesh}/failures?agent=travel",
        "letters": f"{mesh}/letters",
        "failed tasks, page 41": follow(address, f"{mesh}/tasks?state=failed"),
        "agents": f"{mesh}/agents",
        "audit": f"{mesh}/audit",
    }
    problems = []
    print(f"{count} tasks; milliseconds, median and slowest of {_REPEATS}")
    for name, path in paths.items():
        times = []
        for _ in range(_REPEATS):
            begun = monotonic()
            read(address + path)
            times.append(1000 * (monotonic() - begun))
        print(f"  {name:26} {median(times):7.1f} {max(times):7.1f}")
        if median(times) > MAX_MILLISECONDS:
            problems.append(f"{name} takes {median(times):.0f} ms")
    return problems
