"""One call to a server: the way there, its effect, and the way back. The caller may die meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from .loop import WORLD, process_context
from .weather import Fate, Word

T = TypeVar("T")


async def call(effect: Callable[[], T], fate: Fate, error: Callable[[Word], Exception]) -> T:
    """Result of `effect`, which takes place in the server even if the caller dies meanwhile.

    Raises:
        Exception: the result of `error` for a word other than DONE, or the exception of `effect`.
    """
    loop, network = asyncio.get_running_loop(), process_context(WORLD)
    answer: asyncio.Future[T] = loop.create_future()

    def arrive() -> None:
        try:
            result = effect() if fate.takes_effect else None
        except Exception as defect:
            loop.call_later(fate.back, _settle, answer, None, defect, context=network)
        else:
            lost = None if fate.word is Word.DONE else error(fate.word)
            loop.call_later(fate.back, _settle, answer, result, lost, context=network)

    loop.call_later(fate.there, arrive, context=network)
    return await answer


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Result of a coroutine that never waits, like the methods of the in-process store."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise AssertionError("the coroutine waited, so it is not a single step")


def _settle(answer: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if answer.done():
        return  # its caller is gone
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
        answer.exception()  # its caller may never return to retrieve it
