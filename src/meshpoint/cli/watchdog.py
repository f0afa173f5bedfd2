"""Ends the process when a drain takes too long, from a thread that agent code cannot block.

Agent code may block the event loop, swallow its cancellation, or leave threads that Python waits for at exit. The
watchdog thread receives signals through Python's wake-up file descriptor, which works even while the main thread is
busy, and measures the time from there.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from logging.handlers import QueueHandler
from types import FrameType, TracebackType
from typing import Any, Self

from meshpoint.adapters.logging_observer import LoggingObserver
from meshpoint.cli.exits import ExitCode, code_of
from meshpoint.errors import MeshpointError
from meshpoint.model.events import Event, Step

log = logging.getLogger("meshpoint.run")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STDIN = 0
_WAKE = b"\0"
_MARGIN = 0.5
"""Seconds after the drain's time limit in which the event loop can still end the process cleanly."""
_FLUSHED_WITHIN = 1.0


class Watchdog:
    """Calls `stop` on SIGTERM or SIGINT, and ends the process `limit` seconds later or at a second signal.

    Signals within `one_wish` seconds count as one. `supervised`: the end of standard input counts as a signal, too.
    `code` is the exit code at the limit.
    """

    def __init__(
        self, stop: Callable[[str], None], *, limit: float, supervised: bool = False, one_wish: float = 0
    ) -> None:
        self._stop = stop
        self._limit = limit
        self._one_wish = one_wish
        self._reading, self._writing = os.pipe()
        self._watched = [self._reading, _STDIN] if supervised else [self._reading]
        self._first: float | None = None
        self._begun = self._ended = False
        self._deadline: float | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._loop_fd = -1
        self.code = ExitCode.ABANDONED

    def __enter__(self) -> Self:
        """Start listening. Call this in the main thread while the event loop runs."""
        os.set_blocking(self._writing, False)
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._in_main_thread)
        self.listen()
        threading.Thread(target=self._watch, name="meshpoint watchdog", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop handling signals. After a signal, the remaining shutdown stays limited."""
        if error is None:
            self.code = ExitCode.OK
        elif isinstance(error, MeshpointError):
            self.code = code_of(error)
        signal.set_wakeup_fd(self._loop_fd)
        if self._first is None:
            for number, before in self._before.items():
                signal.signal(number, before)
        if self._begun:
            self._arm()
        else:
            self._ended = True
            os.write(self._writing, _WAKE)

    def listen(self) -> None:
        """Make Python report signals to this thread first; it passes them to the event loop."""
        before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._loop_fd = before if before != self._writing else self._loop_fd

    def exit_now(self) -> None:
        """End the process, waiting only for its log."""
        flush_logs()
        os._exit(self.code)

    def _in_main_thread(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self._begin(f"{signal.Signals(number).name} received")
        elif now - self._first >= self._one_wish:
            self._end_by(number)

    def _end_by(self, number: int) -> None:
        flush_logs()
        if number == signal.SIGINT:
            os._exit(ExitCode.INTERRUPTED)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _arm(self) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + self._limit + _MARGIN
            os.write(self._writing, _WAKE)

    def _watch(self) -> None:
        signalled: float | None = None
        while True:
            left = None if self._deadline is None else self._deadline - time.monotonic()
            if left is not None and left <= 0:
                log.warning("the drain timed out: the process ends with exit code %d", self.code)
                self.exit_now()
            ready, _, _ = select.select(self._watched, [], [], left)
            if self._ended:
                os.close(self._reading)
                os.close(self._writing)
                return
            if self._reading in ready:
                for number in os.read(self._reading, 256):
                    if number:
                        signalled = self._heard(signal.Signals(number), signalled)
            if _STDIN in ready and not os.read(_STDIN, 1024):
                self._watched.remove(_STDIN)
                self._begin("the supervisor is gone")

    def _heard(self, number: signal.Signals, first: float | None) -> float | None:
        if self._loop_fd >= 0:
            os.write(self._loop_fd, bytes([number]))
        if number not in _SIGNALS:
            return first
        now = time.monotonic()
        if first is None:
            self._begin(f"{number.name} received")
            return now
        if now - first >= self._one_wish:
            time.sleep(_MARGIN)  # unless it is stuck, the main thread ends the process before
            flush_logs()
            os._exit(128 + number)
        return first

    def _begin(self, why: str) -> None:
        if self._begun:
            return
        self._begun = True
        self._arm()
        log.info("%s: draining for at most %g s", why, self._limit)
        self._stop(why)


class Ending(LoggingObserver):
    """Logs events. Calls `exit_now` when the last of `agents` has drained and any of their code was abandoned.

    Only the broker's connection is left to close by then, and closing it would give other replicas requests whose
    code still runs here.
    """

    def __init__(self, agents: int, exit_now: Callable[[], None]) -> None:
        super().__init__()
        self._left, self._abandoned, self._exit_now = agents, False, exit_now

    def emit(self, event: Event) -> None:
        """Log `event` and check whether it was the last."""
        super().emit(event)
        self._abandoned |= event.step is Step.ABANDONED
        if event.step is Step.DRAINED:
            self._left -= 1
            if not self._left and self._abandoned:
                self._exit_now()


def flush_logs() -> None:
    """Wait briefly for the logging thread."""
    queues: list[Any] = [
        handler.queue for handler in logging.getLogger().handlers if isinstance(handler, QueueHandler)
    ]
    give_up_at = time.monotonic() + _FLUSHED_WITHIN
    while not all(queue.empty() for queue in queues) and time.monotonic() < give_up_at:
        time.sleep(0.005)
    if queues:
        time.sleep(0.02)  # the last record has been taken and is being written
    sys.stdout.flush()
    sys.stderr.flush()
