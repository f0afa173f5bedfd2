"""Report each task that ends without a result, to logs and observers."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.model.events import Step
from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import Failed
from meshpoint.model.secrets import mask_reason


def report_failure(
    task_id: TaskId,
    failure: Failed,
    runtime: ReplicaRuntime,
    raised: Mapping[str, JsonValue] | None = None,
    *,
    refused: bool = False,
) -> None:
    """Report that a task has ended without a result, and why.

    Called once the end is committed. `raised` describes the exception of its code, with secrets
    masked. `refused`: the request ran no code here, because it had expired, for example.
    """
    reason = mask_reason(failure.message, runtime.options.secret_keys)
    detail: dict[str, JsonValue] = {"refused": True} if refused else {}
    if raised is not None:
        detail |= {"error_type": raised["type"], "traceback": raised["traceback"]}
    runtime.steps.emit(Step.TASK_FAILED, task_id, kind=failure.kind.value, reason=reason, **detail)
