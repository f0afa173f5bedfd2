"""One replica in a process: `replica.py CONFIG [--at STEP:PHASE --do kill|freeze [--agent NAME]]`.

Prints every event as a line of JSON, and one more if it stops with an error. At the named event it
kills or freezes itself, between two awaits and with no chance to clean up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from meshpoint import event_loop, wiring
from meshpoint.errors import MeshpointError
from meshpoint.model.events import Event
from meshpoint.settings import load

_SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


class EventReporter:
    """Prints events, and kills or freezes this process at the selected event."""

    def __init__(self, at: str | None, action: str, agent: str | None, skip: int) -> None:
        self._at, self._action, self._agent, self._skip = at, action, agent, skip

    def emit(self, event: Event) -> None:
        record = {
            "step": event.step.value,
            "phase": event.phase.value,
            "agent": event.agent,
            "replica": event.replica,
            "pid": os.getpid(),
            "task_ids": list(event.task_ids),
            "detail": dict(event.detail),
        }
        sys.stdout.write(json.dumps(record) + "\n")
        sys.stdout.flush()
        if self._at == f"{event.step}:{event.phase}" and self._agent in {None, event.agent}:
            self._skip -= 1
            if self._skip < 0:
                self._at = None
                os.kill(os.getpid(), _SIGNALS[self._action])


async def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM. `arguments` defaults to the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--at")
    parser.add_argument("--do", choices=_SIGNALS, default="kill")
    parser.add_argument("--agent")
    parser.add_argument("--skip", type=int, default=0)
    options = parser.parse_args(arguments)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    reporter = EventReporter(options.at, options.do, options.agent, options.skip)
    try:
        await wiring.serve(load([options.config]), observer=reporter, stop=stop)
    except MeshpointError as error:
        refusal = {"step": "stopped", "phase": "failed", "detail": {"error": str(error)}}
        sys.stdout.write(json.dumps(refusal) + "\n")
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    event_loop.run(main())
