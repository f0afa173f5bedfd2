"""Let functions in threads fail, and not hang or unwind their callers.

A future takes no `StopIteration`: before Python 3.12, `asyncio.to_thread` then never returns. And
where code awaits a future with a `GeneratorExit`, asyncio closes all coroutines around the await,
as if the event loop had ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from meshpoint.model.error_text import describe_exception

_GUARDED = "meshpoint_guarded"
"""Attribute of an executor that is guarded already."""


def guard_threads(loop: asyncio.AbstractEventLoop) -> None:
    """Make these errors a `RuntimeError` in the default executor of `loop`, once.

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
