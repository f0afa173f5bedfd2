"""One replica of the demo: `python -m meshpoint.demo.replica`, started by `processes`.

It reads its settings as one line of JSON from standard input, so that passwords do not appear in
the process list. It writes events as lines of JSON. It drains when standard input closes, which
also happens when its parent dies.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time

from meshpoint import event_loop, wiring
from meshpoint.errors import MeshpointError
from meshpoint.model.events import Event, Phase, Step
from meshpoint.settings import Settings

_STDIN, _STDOUT = 0, 1
_REPORTED = {
    (Step.STARTED, Phase.NOTED),
    (Step.SEGMENT, Phase.BEFORE),
    (Step.SEGMENT, Phase.AFTER),
    (Step.SEGMENT, Phase.FAILED),
    (Step.CHECKPOINT, Phase.AFTER),
    (Step.ACK, Phase.AFTER),
    (Step.TAKE_OVER, Phase.AFTER),
    (Step.END, Phase.AFTER),
    (Step.FENCED, Phase.NOTED),
    (Step.DEGRADED, Phase.NOTED),
    (Step.STORE_AWAY, Phase.NOTED),
    (Step.BROKER_AWAY, Phase.NOTED),
    (Step.STORE_BACK, Phase.NOTED),
}


class EventReporter:
    """Writes events to standard output. Thread-safe, since a separate thread renews leases."""

    def __init__(self) -> None:
        self._write_lock = threading.Lock()

    def emit(self, event: Event) -> None:
        """Write `event` if the demo uses it."""
        if (event.step, event.phase) not in _REPORTED:
            return
        record = {
            "step": event.step.value,
            "phase": event.phase.value,
            "agent": event.agent,
            "task_ids": list(event.task_ids),
            "detail": dict(event.detail),
            "at": time.monotonic(),
        }
        line = memoryview(json.dumps(record).encode() + b"\n")
        with self._write_lock:
            while line:
                line = line[os.write(_STDOUT, line) :]


async def _serve(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_stdin_closed() -> None:
        loop.remove_reader(_STDIN)
        stop.set()

    loop.add_reader(_STDIN, on_stdin_closed)  # nothing follows the settings: readable means closed
    await wiring.serve(settings, observer=EventReporter(), stop=stop)


def main() -> None:
    """Serve until standard input closes."""
    with open(_STDIN, "rb", buffering=0, closefd=False) as stdin:
        settings = Settings.model_validate_json(stdin.readline())
    try:
        event_loop.run(_serve(settings))
    except MeshpointError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
