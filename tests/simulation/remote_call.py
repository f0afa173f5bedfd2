"""One call to a server: the way there, its effect, and the way back.

The caller may die meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from .loop import WORLD, process_context
from .network_faults import CallResult, Fate

T = TypeVar("T")


async def remote_call(
    effect: Callable[[], T], fate: Fate, error: Callable[[CallResult], Exception]
) -> T:
    """Result of `effect`, which takes place in the server even if the caller dies meanwhile.

    Raises:
        Exception: the result of `error` for a word other than DONE, or the exception of `effect`.
    """
    loop, network_context = asyncio.get_running_loop(), process_context(WORLD)
    answer: asyncio.Future[T] = loop.create_future()

    def execute() -> None:
        try:
            result = effect() if fate.takes_effect else None
        except Exception as raised:
            loop.call_later(
                fate.response_latency,
                _deliver_answer,
                answer,
                None,
                raised,
                context=network_context,
            )
        else:
            failure = None if fate.result is CallResult.DONE else error(fate.result)
            loop.call_later(
                fate.response_latency,
                _deliver_answer,
                answer,
                result,
                failure,
                context=network_context,
            )

    loop.call_later(fate.request_latency, execute, context=network_context)
    return await answer


def run_at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Result of a coroutine that never waits, like the methods of the in-process store."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise AssertionError("the coroutine waited, so it is not a single step")


def _deliver_answer(answer: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if answer.done():
        return  # its caller is gone
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
        answer.exception()  # its caller may never return to retrieve it
