"""`@step` and `ctx.step` without a replica, and retry policies."""

from __future__ import annotations

import asyncio
import math
from datetime import timedelta
from typing import Any

import pytest

from meshpoint.errors import AgentMisbehaved, ConfigurationError, MemoryUnavailable, StepFailed
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import FailureKind
from meshpoint.model.recorded_work import step
from meshpoint.model.retry_policy import RetryPolicy

AT_ONCE = RetryPolicy(max_attempts=3, initial_interval=0)


@pytest.fixture
def ctx() -> TaskExecutionContext:
    return TaskExecutionContext(TaskId("task"))


async def test_without_a_replica_the_function_is_called(ctx: TaskExecutionContext) -> None:
    async def double(number: int) -> int:
        return 2 * number

    assert await ctx.step("double", double, 4) == 8
    assert await ctx.step("text", str, 4) == "4"


async def test_a_failure_is_a_step_failure(ctx: TaskExecutionContext) -> None:
    def fail() -> None:
        raise KeyError("gone")

    with pytest.raises(StepFailed, match=r"^step 'fail' failed: KeyError: 'gone'$") as raised:
        await ctx.step("fail", fail)
    assert isinstance(raised.value.__cause__, KeyError)


async def test_unavailable_memory_is_no_failure_of_the_step(ctx: TaskExecutionContext) -> None:
    def read() -> None:
        raise MemoryUnavailable("no answer")

    with pytest.raises(MemoryUnavailable):
        await ctx.step("read", read)


async def test_steps_are_not_nested(ctx: TaskExecutionContext) -> None:
    async def outer() -> str:
        return await ctx.step("inner", str, 1)

    with pytest.raises(StepFailed, match="step 'inner' begins inside step 'outer'"):
        await ctx.step("outer", outer)


async def test_a_failed_attempt_is_retried(ctx: TaskExecutionContext) -> None:
    attempts = list[int]()

    @step(retry=AT_ONCE)
    def flaky() -> str:
        attempts.append(1)
        if len(attempts) < 3:
            raise OSError("busy")
        return "done"

    assert await ctx.step("flaky", flaky) == "done"
    attempts.clear()

    @step(retry=RetryPolicy(max_attempts=2, initial_interval=0))
    def hopeless() -> str:
        attempts.append(1)
        raise OSError("busy")

    with pytest.raises(StepFailed):
        await ctx.step("hopeless", hopeless)
    assert len(attempts) == 2


async def test_a_timeout_ends_an_attempt(ctx: TaskExecutionContext) -> None:
    attempts = list[int]()

    @step(timeout=timedelta(microseconds=1), retry=AT_ONCE)
    async def slow() -> None:
        attempts.append(1)
        await asyncio.Event().wait()

    with pytest.raises(StepFailed, match="no result within 1e-06 s") as raised:
        await ctx.step("slow", slow)
    assert (raised.value.kind, len(attempts)) == (FailureKind.TIMEOUT, 3)


async def test_a_timeout_error_of_the_function_is_an_error(ctx: TaskExecutionContext) -> None:
    @step(timeout=60)
    async def fail() -> None:
        raise TimeoutError("the database")

    with pytest.raises(StepFailed) as raised:
        await ctx.step("fail", fail)
    assert raised.value.kind == FailureKind.ERROR


async def test_a_function_that_is_cancelled_from_inside_has_failed(
    ctx: TaskExecutionContext,
) -> None:
    async def fail() -> None:
        raise asyncio.CancelledError

    with pytest.raises(StepFailed, match="it awaited something that was cancelled"):
        await ctx.step("fail", fail)


async def test_a_cancelled_step_is_cancelled(ctx: TaskExecutionContext) -> None:
    running = asyncio.create_task(ctx.step("wait", asyncio.Event().wait))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize(
    ("options", "function", "problem"),
    [
        ({"timeout": 5}, str, "timeout= cannot stop"),
        ({"timeout": 0}, asyncio.sleep, "timeout is 0"),
        ({"timeout": -1}, asyncio.sleep, "timeout is -1; it must not be negative"),
        ({"timeout": "5"}, asyncio.sleep, "timeout must be a timedelta or a number of seconds"),
        (
            {"timeout": 86_400_000},
            asyncio.sleep,
            r"timeout: 86400000 s is 2.7 years; durations are in seconds: timedelta\(days=1\)",
        ),
        ({}, len, "cannot be given options"),
    ],
)
def test_options_are_checked(options: Any, function: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        step(**options)(function)


def waits(policy: RetryPolicy, kind: FailureKind = FailureKind.ERROR) -> list[float]:
    found, attempt, elapsed = list[float](), 2, 0.0
    while (wait := policy.wait_before(attempt, kind, elapsed)) is not None:
        found.append(wait)
        elapsed += wait
        attempt += 1
    return found


def test_waits_grow_up_to_a_limit() -> None:
    policy = RetryPolicy(
        max_attempts=6, initial_interval=2, backoff_factor=3, max_interval=20, jitter=False
    )
    assert waits(policy) == [2, 6, 18, 20, 20]


def test_jitter_shortens_waits_to_half_at_most() -> None:
    policy = RetryPolicy(max_attempts=200, initial_interval=10, backoff_factor=1)
    found = waits(policy)
    assert 5 <= min(found) < max(found) <= 10


def test_no_attempt_starts_after_max_elapsed() -> None:
    policy = RetryPolicy(max_attempts=9, backoff_factor=1, jitter=False, max_elapsed=3.5)
    assert waits(policy) == [1, 1, 1]


def test_only_some_kinds_are_retried() -> None:
    policy = RetryPolicy(retry_on=["timeout"], jitter=False)
    assert waits(policy) == []
    assert waits(policy, FailureKind.TIMEOUT) == [1, 2]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"max_attempts": 0}, "max_attempts is 0"),
        ({"backoff_factor": 0.5}, "backoff_factor is 0.5"),
        ({"initial_interval": -1}, "initial_interval is -1"),
        ({"max_elapsed": True}, "max_elapsed must be a timedelta"),
        ({"retry_on": ["flaky"]}, "retry_on has 'flaky'"),
        ({"retry_on": [[]]}, r"retry_on has \[\]"),
        ({"retry_on": "error"}, "retry_on must be a list"),
        ({"retry_on": iter(["error"])}, "retry_on must be a list"),
        ({"retry_on": None}, "retry_on must be a list"),
        ({"max_attempts": "3"}, "max_attempts is '3'"),
        ({"max_attempts": math.nan}, "max_attempts is nan"),
        ({"max_attempts": 10**5000}, "max_attempts is a value of type int"),
        ({"backoff_factor": "2"}, "backoff_factor is '2'"),
        ({"backoff_factor": math.inf}, "backoff_factor is inf"),
        ({"backoff_factor": 10**5000}, "backoff_factor is a value of type int"),
        ({"initial_interval": -(10**5000)}, "initial_interval is a value of type int"),
        ({"initial_interval": timedelta.max}, "initial_interval is .*at most ten years"),
        ({"max_interval": None}, "max_interval must be a timedelta"),
    ],
)
def test_a_policy_is_checked(values: Any, problem: str) -> None:
    with pytest.raises(AgentMisbehaved, match=problem):
        RetryPolicy(**values)


def test_a_large_factor_does_not_overflow() -> None:
    policy = RetryPolicy(max_attempts=2_000, backoff_factor=10.0, jitter=False)
    assert policy.wait_before(1_999, FailureKind.ERROR, 0) == 100


def test_no_initial_interval_is_no_wait_before_any_attempt() -> None:
    policy = RetryPolicy(max_attempts=2_000, initial_interval=0, backoff_factor=3)
    assert policy.wait_before(1_999, FailureKind.ERROR, 0) == 0
