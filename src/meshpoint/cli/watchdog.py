"""End the process if a drain takes too long, from a thread that agent code cannot block.

Agent code may block the event loop, ignore its cancellation, or leave threads that Python waits
for at exit. The watchdog thread receives signals through Python's wake-up file descriptor, which
works even while the main thread is busy, and measures the time from there.
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

from meshpoint.cli.exits import ExitCode, exit_code_for
from meshpoint.errors import MeshpointError
from meshpoint.model.events import Event, Step
from meshpoint.wiring import make_observer

log = logging.getLogger("meshpoint.run")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STDIN = 0
_WAKE_BYTE = b"\0"
_EXIT_MARGIN = 0.5
"""Seconds after the drain's time limit in which the event loop can still end the process cleanly.
"""
_FLUSH_TIMEOUT = 1.0


class Watchdog:
    """Limits the time of a drain.

    It calls `stop` on SIGTERM or SIGINT, and ends the process `limit` seconds later or at a second
    signal. Signals within `signal_debounce` seconds count as one. With `supervised`, the end of
    standard input also counts as a signal. `exit_code` is used if the limit is reached.
    """

    def __init__(
        self,
        stop: Callable[[str], None],
        *,
        limit: float,
        supervised: bool = False,
        signal_debounce: float = 0,
    ) -> None:
        self._stop = stop
        self._limit = limit
        self._signal_debounce = signal_debounce
        self._read_fd, self._write_fd = os.pipe()
        self._watched_fds = [self._read_fd, _STDIN] if supervised else [self._read_fd]
        self._first_signal_at: float | None = None
        self._draining = self._closed = False
        self._deadline: float | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._loop_wakeup_fd = -1
        self.exit_code = ExitCode.ABANDONED

    def __enter__(self) -> Self:
        """Start listening. Call this in the main thread while the event loop runs."""
        os.set_blocking(self._write_fd, False)
        for number in _SIGNALS:
            self._previous_handlers[number] = signal.signal(number, self._handle_signal)
        self.install_wakeup_fd()
        threading.Thread(target=self._watch, name="meshpoint watchdog", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop handling signals. After a signal, the time limit still applies to the shutdown."""
        if error is None:
            self.exit_code = ExitCode.OK
        elif isinstance(error, MeshpointError):
            self.exit_code = exit_code_for(error)
        signal.set_wakeup_fd(self._loop_wakeup_fd)
        if self._first_signal_at is None:
            for number, before in self._previous_handlers.items():
                signal.signal(number, before)
        if self._draining:
            self._start_deadline()
        else:
            self._closed = True
            os.write(self._write_fd, _WAKE_BYTE)

    def install_wakeup_fd(self) -> None:
        """Make Python report signals to this thread first, which forwards them to the loop."""
        previous_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._loop_wakeup_fd = (
            previous_fd if previous_fd != self._write_fd else self._loop_wakeup_fd
        )

    def exit_now(self) -> None:
        """End the process, waiting only for its log."""
        _flush_logs()
        os._exit(self.exit_code)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first_signal_at is None:
            self._first_signal_at = now
            self._begin_drain(f"{signal.Signals(number).name} received")
        elif now - self._first_signal_at >= self._signal_debounce:
            self._exit_by_signal(number)

    def _exit_by_signal(self, number: int) -> None:
        _flush_logs()
        if number == signal.SIGINT:
            os._exit(ExitCode.INTERRUPTED)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _start_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + self._limit + _EXIT_MARGIN
            os.write(self._write_fd, _WAKE_BYTE)

    def _watch(self) -> None:
        first_signal_at: float | None = None
        while True:
            remaining = None if self._deadline is None else self._deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                log.warning(
                    "the drain timed out: the process ends with exit code %d", self.exit_code
                )
                self.exit_now()
            ready, _, _ = select.select(self._watched_fds, [], [], remaining)
            if self._closed:
                os.close(self._read_fd)
                os.close(self._write_fd)
                return
            if self._read_fd in ready:
                for number in os.read(self._read_fd, 256):
                    if number:
                        first_signal_at = self._on_wakeup(signal.Signals(number), first_signal_at)
            if _STDIN in ready and not os.read(_STDIN, 1024):
                self._watched_fds.remove(_STDIN)
                self._begin_drain("the supervisor has ended")

    def _on_wakeup(self, number: signal.Signals, first_signal_at: float | None) -> float | None:
        if self._loop_wakeup_fd >= 0:
            os.write(self._loop_wakeup_fd, bytes([number]))
        if number not in _SIGNALS:
            return first_signal_at
        now = time.monotonic()
        if first_signal_at is None:
            self._begin_drain(f"{number.name} received")
            return now
        if now - first_signal_at >= self._signal_debounce:
            time.sleep(_EXIT_MARGIN)  # unless it is stuck, the main thread ends the process first
            _flush_logs()
            os._exit(128 + number)
        return first_signal_at

    def _begin_drain(self, reason: str) -> None:
        if self._draining:
            return
        self._draining = True
        self._start_deadline()
        log.info("%s: draining for at most %g s", reason, self._limit)
        self._stop(reason)


class DrainExitObserver:
    """Logs events, and calls `exit_now` after the drain if agent code was abandoned.

    That is when the last of `agents` has drained. Only the broker's connection is still open then,
    and closing it would requeue requests whose code is still running here.
    """

    def __init__(self, agents: int, exit_now: Callable[[], None]) -> None:
        self._log = make_observer()
        self._undrained, self._abandoned, self._exit_now = agents, False, exit_now

    def emit(self, event: Event) -> None:
        """Log `event` and check whether it was the last."""
        self._log.emit(event)
        self._abandoned |= event.step is Step.ABANDONED
        if event.step is Step.DRAINED:
            self._undrained -= 1
            if not self._undrained and self._abandoned:
                self._exit_now()


def _flush_logs() -> None:
    """Wait briefly for the logging thread."""
    queues: list[Any] = [
        handler.queue
        for handler in logging.getLogger().handlers
        if isinstance(handler, QueueHandler)
    ]
    deadline = time.monotonic() + _FLUSH_TIMEOUT
    while not all(queue.empty() for queue in queues) and time.monotonic() < deadline:
        time.sleep(0.005)
    if queues:
        time.sleep(0.02)  # the last record has left the queue but is still being written
    sys.stdout.flush()
    sys.stderr.flush()
