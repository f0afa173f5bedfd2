"""The process of an isolated run: one segment of one task, with its own connections.

`adapters.child_process` starts it, directly or through `template`. That module documents the protocol of its pipes;
`adapters.template_process` documents the protocol of the template's socket.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from meshpoint import event_loop, wiring
from meshpoint.adapters.logging_observer import logging_to
from meshpoint.errors import ConfigurationError, Unavailable
from meshpoint.model.checkpoint import Run
from meshpoint.model.events import Event
from meshpoint.ports.isolation import Ending, Word
from meshpoint.settings import Settings

log = logging.getLogger("meshpoint.isolated")

_BEAT = 1.0
"""Seconds between signs of life."""
_ATOMIC = 4096
"""Bytes that a pipe writes atomically."""
_LET_DIE_FIRST = "1000"
_PR_SET_PDEATHSIG = 1


def main(given: Mapping[str, Any]) -> NoReturn:
    """Run the segment named by `given`, then end this process even if agent code is still running."""
    _end_with_parent()
    _die_first()
    tells = Tells(int(given["tells"]))
    code = 1
    with logging_to(sys.stderr, given["style"]["level"], as_json=given["style"]["as_json"]):
        try:
            event_loop.run(_run(given, tells))
            code = 0
        except ConfigurationError as error:
            tells.exit(Ending.IMPOSSIBLE, f"cannot run it: {error}")
        except Unavailable as error:
            tells.exit(Ending.UNSTARTED, f"could not begin: {error}")
        except BaseException:
            log.exception("an isolated run failed")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _run(given: Mapping[str, Any], tells: Tells) -> None:
    settings, run = Settings.model_validate(given["settings"]), Run(**given["run"])
    (agent,) = settings.agents
    options, loop = agent.options(), asyncio.get_running_loop()
    stop, cancel = asyncio.Event(), asyncio.Event()
    # Some platforms signal every process of a service: the segment gets as much time as our parent's segments.
    loop.add_signal_handler(signal.SIGTERM, lambda: loop.call_later(options.drain_timeout.total_seconds(), stop.set))
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    told = {Word.CANCEL: cancel, Word.DRAIN: stop}
    _listen(lambda word: loop.call_soon_threadsafe(told[word].set))
    beating = asyncio.create_task(_beat(tells))
    broker = wiring.make_broker(settings.mesh, "isolated")
    worker = wiring.make_worker(agent, settings.mesh.namespace, broker, tells, wiring.isolated_options(options))
    try:
        await broker.open()
        settled = await worker.run_one(run, started=tells.started, stop=stop, cancel=cancel)
    finally:
        await broker.close()
        beating.cancel()
    if settled:
        tells.exit(Ending.SETTLED)


async def _beat(tells: Tells) -> None:
    while True:
        tells.alive()
        await asyncio.sleep(_BEAT)


class Tells:
    """An observer that reports events, signs of life and the result to the parent."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._lock = descriptor, threading.Lock()
        os.set_inheritable(descriptor, False)  # not inherited by processes that agent code starts
        os.set_blocking(descriptor, False)

    def emit(self, event: Event) -> None:
        """Send an event; it is lost if the parent does not read."""
        told = {
            "step": event.step,
            "phase": event.phase,
            "agent": event.agent,
            "replica": event.replica,
            "task_ids": event.task_ids,
            "detail": dict(event.detail),
        }
        if not self._write({"event": told}):
            self._write({"event": {**told, "detail": {}}})

    def alive(self) -> None:
        """Report that the event loop is running."""
        self._write({"alive": True})

    def started(self) -> None:
        """Report that this process renews the lease from now on."""
        self._write({"started": True}, must=True)

    def exit(self, ending: Ending, reason: str = "") -> None:
        """Report the result of the run."""
        self._write({"exit": ending.name, "reason": reason[:1000]}, must=True)

    def _write(self, value: Mapping[str, Any], *, must: bool = False) -> bool:
        line = json.dumps(value, default=str).encode() + b"\n"
        if len(line) > _ATOMIC:
            return False
        with self._lock, suppress(BrokenPipeError):
            while True:
                try:
                    os.write(self._descriptor, line)
                except BlockingIOError:
                    if not must:
                        return True
                    select.select([], [self._descriptor], [])
                else:
                    return True
        return True


def _listen(act: Callable[[Word], object]) -> None:
    """Obey the parent from a thread, since agent code may block the event loop. If the parent dies, end at once."""

    def listen() -> None:
        for line in sys.stdin.buffer:
            act(Word(json.loads(line)))
        os._exit(1)

    threading.Thread(target=listen, name="meshpoint parent", daemon=True).start()


def template(orders: socket.socket, modules: Sequence[str], idle: float) -> NoReturn:
    """Import `modules`, then fork a process for each request, one at a time. Agent code is never imported here.

    Exits with its parent, after `idle` seconds without a child, or at the first error. The parent then starts
    processes without a template.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # a service manager may signal every process; children handle it
        signal.signal(number, signal.SIG_IGN)
    _end_with_parent()
    for name in modules:
        with suppress(Exception):  # a child that needs it reports the error
            import_module(name)
    gc.collect()
    gc.freeze()  # keeps collections in children from copying every page
    orders.settimeout(idle)
    with suppress(TimeoutError):
        while True:
            task_id, descriptors, _, _ = socket.recv_fds(orders, _ATOMIC, 3)
            if not task_id:
                break
            _fork(task_id, *descriptors)
    os._exit(0)


def _fork(task_id: bytes, words: int, tells: int, status: int) -> None:
    """Fork a process; send its pidfd, then its exit code, through `status`."""
    me = os.getpid()
    with socket.socket(fileno=status) as answers:
        pid = os.fork()
        if pid == 0:
            answers.close()
            _forked(me, task_id, words, tells)
        os.close(words)
        os.close(tells)
        process = os.pidfd_open(pid)
        with suppress(BrokenPipeError):
            socket.send_fds(answers, [task_id], [process])
        os.close(process)
        _, ended = os.waitpid(pid, 0)
        with suppress(BrokenPipeError):
            answers.send(b"%d" % os.waitstatus_to_exitcode(ended))


def _forked(parent: int, task_id: bytes, words: int, tells: int) -> NoReturn:
    """Set up the child as `adapters.child_process` would, with `words` as its standard input, and run it."""
    try:
        _end_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        os.setsid()
        os.dup2(words, sys.stdin.fileno())
        os.close(words)
        with suppress(OSError):
            Path("/proc/self/comm").write_bytes(task_id)  # shown in process listings
        if given := sys.stdin.buffer.readline():
            main({**json.loads(given), "tells": tells})
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _end_with_parent() -> None:
    """Die with the parent even while agent code holds the GIL."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _die_first() -> None:
    """Be the OOM killer's first choice."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_LET_DIE_FIRST)
