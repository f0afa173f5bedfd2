"""Errors of steps settle a task, even if a framework swallows them."""

from __future__ import annotations

from asyncio import Future
from contextlib import suppress

import pytest

from meshpoint import MemoryUnavailable, StepFailed, TaskExecutionContext
from meshpoint.frameworks.steps import StepExited, SwallowedErrors, record_step, step_name
from meshpoint.model.ids import TaskId


async def unavailable() -> None:
    raise MemoryUnavailable("the memory is unavailable")


async def broken() -> None:
    raise ValueError("broken")


async def leave() -> None:
    raise GeneratorExit("left")


async def swallow_exit() -> None:
    with SwallowedErrors(), suppress(Exception):
        await record_step(TaskExecutionContext(TaskId("task")), "tool", leave)


async def swallow() -> None:
    with SwallowedErrors(), suppress(Exception):
        await record_step(TaskExecutionContext(TaskId("task")), "tool", unavailable)


async def translate(into: BaseException) -> None:
    with SwallowedErrors():
        try:
            await record_step(TaskExecutionContext(TaskId("task")), "tool", unavailable)
        except Exception:
            raise into from None


async def fail() -> None:
    with SwallowedErrors():
        await record_step(TaskExecutionContext(TaskId("task")), "tool", broken)


async def test_an_error_that_a_framework_swallows_is_raised_again() -> None:
    with pytest.raises(MemoryUnavailable, match="is unavailable"):
        await swallow()


async def test_an_error_that_a_framework_translates_is_its_cause() -> None:
    with pytest.raises(MemoryUnavailable) as caught:
        await translate(RuntimeError("a tool has failed"))
    assert isinstance(caught.value.__cause__, RuntimeError)


async def test_a_failed_step_is_left_to_the_framework() -> None:
    with pytest.raises(StepFailed):
        await fail()


async def test_an_exit_is_not_replaced() -> None:
    with pytest.raises(KeyboardInterrupt):
        await translate(KeyboardInterrupt())


async def test_a_generator_exit_of_a_step_is_an_error_that_settles_the_task() -> None:
    with pytest.raises(StepExited, match="step 'tool' has raised GeneratorExit: left"):
        await swallow_exit()


async def test_a_step_that_is_closed_is_no_failure() -> None:
    """As when the event loop ends before it."""

    async def wait() -> None:
        await Future()

    step = record_step(TaskExecutionContext(TaskId("task")), "tool", wait)
    step.send(None)
    step.close()


def test_long_and_unprintable_ids_have_names_too() -> None:
    assert step_name("tool", "book", "call-1") == "tool book call-1"
    names = {step_name("tool", "book", each) for each in ("x" * 500, "y" * 500, "\n", "\ud800")}
    assert len(names) == 4
    assert all(each.isprintable() and len(each) < 100 for each in names)
