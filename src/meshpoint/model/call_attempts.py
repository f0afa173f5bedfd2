"""Attempts at a peer call with a `RetryPolicy`: what each stores, and when the next one is due.

Instants are seconds since the epoch by the store's clock.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta

from meshpoint.errors import AgentFailed, AgentMisbehaved
from meshpoint.model.ids import TaskId, new_id, split_resumed_id
from meshpoint.model.outcomes import AdvisedFailure, Failed, FailureKind
from meshpoint.model.retry_policy import RetryPolicy, duration_problem, duration_seconds
from meshpoint.model.subtasks import Child
from meshpoint.model.tasks import PlannedCall
from meshpoint.model.usage import TokenUsage

_log = logging.getLogger("meshpoint.store")

ANSWERED_EARLIER = Failed(FailureKind.CANCELLED, "an earlier attempt has the result")
"""The outcome of the open attempt if an earlier attempt has a result after all."""

_DURATIONS = ("initial_interval", "max_interval", "max_elapsed")


@dataclass(frozen=True, slots=True)
class CallAttempt:
    """One attempt at a call.

    Attributes:
        policy: retry policy of the call.
        timeout: seconds for each attempt; `None` for no limit.
        number: starts at 1.
        began_at: when the first attempt began.
    """

    policy: RetryPolicy
    timeout: float | None
    began_at: float
    number: int = 1

    @classmethod
    def first(cls, call: PlannedCall, now: float) -> CallAttempt | None:
        """The first attempt at `call`, which begins `now`. `None` if it is not retried."""
        if call.retry is None:
            return None
        timeout = None if call.timeout is None else call.timeout.total_seconds()
        return cls(call.retry, timeout, now)

    @classmethod
    def decode(cls, stored: str | None) -> CallAttempt | None:
        """Decode what `encode` returned.

        `None` if the call is not retried, or if the text is damaged or of a later release; then
        the next failure is final.
        """
        if stored is None:
            return None
        try:
            values = json.loads(stored)
            policy = values["policy"]
            # As a number, a duration of more than a year would be refused.
            durations = {name: policy.get(name) for name in _DURATIONS}
            policy |= {
                name: timedelta(seconds=seconds)
                for name, seconds in durations.items()
                if seconds is not None
            }
            return cls(**(values | {"policy": RetryPolicy(**policy)}))
        except (ValueError, TypeError, KeyError, AttributeError, AgentMisbehaved) as error:
            _log.warning("a call is not retried, because its policy cannot be read: %s", error)
            return None

    def encode(self) -> str:
        """The attempt as JSON."""
        policy = {each.name: getattr(self.policy, each.name) for each in fields(self.policy)}
        for name in _DURATIONS:
            if policy[name] is not None:
                policy[name] = duration_seconds(policy[name], name)
        policy["retry_on"] = sorted(str(kind) for kind in self.policy.retry_on)
        return json.dumps(
            {
                "policy": policy,
                "timeout": self.timeout,
                "began_at": self.began_at,
                "number": self.number,
            }
        )

    def next(
        self,
        kind: FailureKind,
        now: float,
        deadlines: Sequence[float | None],
        *,
        retryable: bool = True,
        retry_after: float | None = None,
    ) -> NextAttempt | None:
        """The attempt after this one, which fails `now`. `None` if the failure is final.

        It is final if the next attempt could not begin before the earliest of `deadlines`.
        """
        if not retryable or kind is FailureKind.CANCELLED:
            return None
        wait = self.policy.wait_before(
            self.number + 1, kind, now - self.began_at, at_least=retry_after or 0.0
        )
        if wait is None:
            return None
        due_at = now + wait
        if any(deadline is not None and due_at >= deadline for deadline in deadlines):
            return None
        return NextAttempt(TaskId(new_id()), replace(self, number=self.number + 1), due_at)


@dataclass(frozen=True, slots=True)
class NextAttempt:
    """An attempt that begins at `due_at`, with its own id."""

    sub_task_id: TaskId
    attempt: CallAttempt
    due_at: float

    def deadlines(
        self, idle_timeout: float | None, task_deadline: float | None, no_deadline: float
    ) -> tuple[float, float]:
        """Its absolute deadline, and the earlier of that and its first idle deadline."""
        timeout = self.attempt.timeout
        limits = [task_deadline, None if timeout is None else self.due_at + timeout]
        absolute = min([each for each in limits if each is not None], default=no_deadline)
        idle = absolute if idle_timeout is None else self.due_at + idle_timeout
        return absolute, min(absolute, idle)


def superseded(generation: int) -> int:
    """The generation stored for earlier attempts at calls of `generation`. Its own inverse.

    Detached cancels have -1.
    """
    return -2 - generation


def children_of_attempts(
    children: Sequence[Child], attempts: Sequence[tuple[str, TaskId]]
) -> list[Child]:
    """The peers' tasks to add to the `children` of an operation: old and new id of each attempt.

    When the operation is resumed, it asks the call's newest task first.
    """
    added: list[Child] = []
    for earlier_id, sub_task_id in attempts:
        task_id = split_resumed_id(earlier_id)[0]
        same = [child for child in (*children, *added) if child.id == task_id]
        added += [child.model_copy(update={"id": sub_task_id}) for child in same[-1:]]
    return added


def failure_of(error: AgentFailed, message: str, kind: FailureKind, usage: TokenUsage) -> Failed:
    """The failure of a task whose code raised `error`, with its advice for requesters."""
    retry_after = error.retry_after
    if retry_after is not None:
        if (problem := duration_problem(retry_after, "retry_after")) is not None:
            message, retry_after = f"{message} ({'; '.join(problem)})", None
        else:
            retry_after = duration_seconds(retry_after, "retry_after")
    retryable = bool(error.retryable)
    if retryable and retry_after is None:
        return Failed(kind, message, usage)
    return AdvisedFailure(kind, message, usage, retryable=retryable, retry_after=retry_after)


def final_failure(kind: FailureKind, message: str) -> AdvisedFailure:
    """A failure that another attempt would only repeat."""
    return AdvisedFailure(kind, message, retryable=False)
