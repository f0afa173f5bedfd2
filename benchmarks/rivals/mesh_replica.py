"""One replica: `python -m benchmarks.rivals.mesh_replica`, with settings as a JSON line on stdin.

It prints `ready` when it serves, and drains when standard input closes. With
`MESHPOINT_PROFILE=FOLDER` it writes a profile.
"""

from __future__ import annotations

import asyncio
import cProfile
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from meshpoint import event_loop, wiring
from meshpoint.model.events import Event, Step
from meshpoint.settings import Settings


class _ReadinessReporter:
    """Prints `ready` and calls `on_ready` once all agents of this process serve."""

    def __init__(self, agents: int, on_ready: Callable[[], object]) -> None:
        self._not_ready, self._on_ready = agents, on_ready

    def emit(self, event: Event) -> None:
        if event.step is Step.STARTED:
            self._not_ready -= 1
            if not self._not_ready:
                self._on_ready()
                print("ready", flush=True)


async def _serve(settings: Settings, on_ready: Callable[[], object]) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def wait_until_closed() -> None:
        loop.remove_reader(0)
        stop.set()

    loop.add_reader(
        0, wait_until_closed
    )  # nothing follows the settings, so stdin is readable only when closed
    await wiring.serve(
        settings, observer=_ReadinessReporter(len(settings.agents), on_ready), stop=stop
    )


def main() -> None:
    """Serve until standard input closes."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        settings = Settings.model_validate_json(stdin.readline())
    folder = os.environ.get("MESHPOINT_PROFILE")
    if not folder:
        event_loop.run(_serve(settings, lambda: None))
        return
    print(
        f"serving {', '.join(agent.name for agent in settings.agents)}: {os.getpid()}",
        file=sys.stderr,
    )
    profile = cProfile.Profile(time.thread_time)  # excludes other threads and processes
    event_loop.run(_serve(settings, profile.enable))
    profile.disable()
    profile.dump_stats(Path(folder) / f"{os.getpid()}.prof")


if __name__ == "__main__":
    main()
