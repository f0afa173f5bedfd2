"""Confine `SystemExit` and `KeyboardInterrupt` raised by agent code to its segment.

asyncio re-raises `SystemExit` and `KeyboardInterrupt` out of the event loop from any task or
callback, including background tasks that agent code starts and never awaits. A task factory uses a
context variable to find the segment that started a task, and turns such an exit into the failure
of that segment. Tasks not started by agent code are unaffected.

Functions in threads are guarded as well. A future takes no `StopIteration`: before Python 3.12,
`asyncio.to_thread` then never returns. And where code awaits a future with a `GeneratorExit`,
asyncio closes all coroutines around the await, as if the event loop had ended.
"""

from __future__ import annotations

import asyncio
import dis
import logging
import signal
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass
from types import CoroutineType, TracebackType
from typing import Any, cast

from meshpoint.errors import Interrupted
from meshpoint.model.error_text import describe_exception

log = logging.getLogger("meshpoint.run")

EXITS = (SystemExit, KeyboardInterrupt)
"""The exceptions that asyncio re-raises out of the event loop."""
_CONTAINED = (*EXITS, GeneratorExit)
"""asyncio would close all coroutines that await a task which has raised `GeneratorExit`."""
_GUARDED = "meshpoint_guarded"
"""Attribute of an executor that is guarded already."""


@dataclass(slots=True)
class Origin:
    """The segment that code runs for.

    `on_exit` handles an exit in a task started by the code. It is `None` once the segment has
    ended: later failures of background tasks no longer affect it.
    """

    on_exit: Callable[[str], None] | None

    def report_exit(self, error: BaseException) -> None:
        """Fail the segment if it is still running."""
        description = describe_exception(error)
        log.warning("agent code raised %s in a task that it had started", description)
        if self.on_exit is not None:
            self.on_exit(description)


current_origin: ContextVar[Origin | None] = ContextVar("meshpoint_origin", default=None)
"""The segment that the current context runs for."""


def in_agent_code() -> bool:
    """Whether the current context belongs to agent code."""
    return current_origin.get() is not None


def is_user_interrupt(error: BaseException) -> bool:
    """Whether this exit came from a person's Ctrl-C rather than a `raise`."""
    if not isinstance(error, KeyboardInterrupt):
        return False
    if isinstance(error, Interrupted):
        return True
    innermost: TracebackType | None = None
    trace = error.__traceback__
    while trace is not None:
        innermost, trace = trace, trace.tb_next
    if innermost is None:
        return False
    code = innermost.tb_frame.f_code
    if code.co_name == "_on_sigint" and code.co_filename == asyncio.runners.__file__:
        return True
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    # Python's own handler adds no frame. It never interrupts at a `raise`, or where an await
    # propagates an error.
    return dis.opname[code.co_code[innermost.tb_lasti]] not in {
        "RAISE_VARARGS",
        "RERAISE",
        "SEND",
        "YIELD_VALUE",
    }


def is_defect(error: BaseException) -> bool:
    """Whether `error` must not affect other tasks: no cancellation and no person's Ctrl-C."""
    return not (isinstance(error, asyncio.CancelledError) or is_user_interrupt(error))


class _ContainedCoroutine(Coroutine[Any, Any, Any]):
    """Wraps a coroutine so that an exit ends only its asyncio task, not the event loop."""

    __slots__ = ("_coro", "_origin")

    def __init__(self, coro: Any, origin: Origin | None) -> None:
        self._coro, self._origin = coro, origin

    def send(self, value: Any) -> Any:
        try:
            return self._coro.send(value)
        except _CONTAINED as error:
            self._contain(error)

    def throw(self, *error: Any) -> Any:
        try:
            return self._coro.throw(*error)
        except _CONTAINED as raised:
            self._contain(raised)

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield from self._coro.__await__())

    def __getattr__(self, name: str) -> Any:  # expose its name and frame for debugging
        return getattr(self._coro, name)

    def _contain(self, error: BaseException) -> None:
        if is_user_interrupt(error):
            raise error
        if self._origin is not None:
            self._origin.report_exit(error)
        else:
            log.warning("a finalizer raised %s", describe_exception(error))
        raise asyncio.CancelledError(describe_exception(error)) from None


class _ContainingTaskFactory:
    """A task factory that wraps the loop's previous one."""

    def __init__(self, previous: Any) -> None:
        self.previous = previous
        self.users = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        context: Context | None = options.get("context")
        origin = current_origin.get() if context is None else context.get(current_origin)
        # The event loop closes abandoned async generators in tasks without a known segment.
        if origin is not None or type(coro) is not CoroutineType:
            coro = _ContainedCoroutine(coro, origin)
        if self.previous is not None:
            return self.previous(loop, coro, **options)
        return asyncio.Task(coro, loop=loop, **options)


@contextmanager
def contain_exits() -> Iterator[Callable[[], None]]:
    """Contain exits in tasks that agent code starts on the running event loop.

    Call the yielded function to contain exits until the event loop ends, because some code is
    still running.
    """
    loop = asyncio.get_running_loop()
    _guard_threads(loop)
    factory: Any = loop.get_task_factory()
    if not isinstance(factory, _ContainingTaskFactory):
        factory = _ContainingTaskFactory(factory)
        loop.set_task_factory(factory)
    factory.users += 1
    is_permanent = False

    def make_permanent() -> None:
        nonlocal is_permanent
        is_permanent = True

    try:
        yield make_permanent
    finally:
        factory.users -= not is_permanent
        if not factory.users and cast(Any, loop.get_task_factory()) is factory:
            loop.set_task_factory(factory.previous)


def _guard_threads(loop: asyncio.AbstractEventLoop) -> None:
    """Turn `StopIteration` and `GeneratorExit` in the default executor into `RuntimeError`, once.

    An executor that the loop has stays in place. Loops that hide theirs, such as uvloop's, are
    left alone.
    """
    if not hasattr(loop, "_default_executor"):
        return
    executor: Any = loop._default_executor
    if executor is None:
        executor = ThreadPoolExecutor(thread_name_prefix="asyncio")
        loop.set_default_executor(executor)
    if not hasattr(executor, _GUARDED):
        setattr(executor, _GUARDED, True)
        executor.submit = _guard(executor.submit)


def _guard(submit: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    def guarded_submit(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return submit(_call, function, args, kwargs)

    return guarded_submit


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except (StopIteration, GeneratorExit) as error:
        raise RuntimeError(f"a thread raised {describe_exception(error)}") from error
