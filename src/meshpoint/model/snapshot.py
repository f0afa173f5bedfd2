"""Snapshots of the values that agent code sets on a context, and their differences."""

from __future__ import annotations

from typing import Any

from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.tasks import CheckpointDict
from meshpoint.model.usage import TokenUsage

_LIST_FIELDS = ("produced_artifacts", "artifact_signals_to_return")


def snapshot(ctx: TaskExecutionContext) -> CheckpointDict:
    """Copy the values that agent code can set on a context."""
    return {
        "response_buffer": ctx.response_buffer,
        "produced_artifacts": ctx.produced_artifacts.to_plain(),
        "artifact_signals_to_return": ctx.artifact_signals_to_return.to_plain(),
        "flags": ctx.flags.to_plain(),
        "token_usage": ctx.token_usage.model_dump(mode="json"),
    }


def rewind(ctx: TaskExecutionContext, to: CheckpointDict) -> None:
    """Restore a snapshot in place, because agent code may hold references to the containers."""
    ctx.response_buffer = str(to["response_buffer"])
    for name in _LIST_FIELDS:
        getattr(ctx, name)[:] = to[name]
    ctx.flags.clear()
    ctx.flags.update(to["flags"])
    set_usage(ctx, TokenUsage.model_validate(to["token_usage"]))


def set_usage(ctx: TaskExecutionContext, usage: TokenUsage) -> None:
    """Replace the usage in place, because agent code may hold references to it."""
    if usage.is_empty and ctx.token_usage.is_empty:
        return
    for name in TokenUsage.model_fields:
        setattr(ctx.token_usage, name, getattr(usage, name))


def diff(before: CheckpointDict, after: CheckpointDict) -> CheckpointDict:
    """The changes between two snapshots, in a form that `apply_diff` can apply to another context.

    Additions are recorded as additions, because other code may have added values at the same time.
    Returns `{}` if nothing changed.
    """
    delta: dict[str, Any] = {}
    earlier: Any
    later: Any
    for name in ("response_buffer", *_LIST_FIELDS):
        earlier, later = before[name], after[name]
        if later != earlier:
            added = later[: len(earlier)] == earlier
            delta[name] = {"add": later[len(earlier) :]} if added else {"set": later}
    earlier, later = before["flags"], after["flags"]
    if later != earlier:
        unchanged = {key for key in later if key in earlier and later[key] == earlier[key]}
        delta["flags"] = {
            "set": {key: value for key, value in later.items() if key not in unchanged},
            "gone": [key for key in earlier if key not in later],
        }
    if after["token_usage"] != before["token_usage"]:
        delta["token_usage"] = _subtract_usage(before["token_usage"], after["token_usage"])
    return delta


def apply_diff(ctx: TaskExecutionContext, delta: CheckpointDict) -> None:
    """Apply the result of `diff` to `ctx` in place."""
    fields: Any = delta
    for name in ("response_buffer", *_LIST_FIELDS):
        match fields.get(name):
            case {"add": added}:
                setattr(ctx, name, getattr(ctx, name) + added)
            case {"set": value}:
                setattr(ctx, name, value)
    for key in fields.get("flags", {}).get("gone", ()):
        ctx.flags.pop(key, None)
    ctx.flags.update(fields.get("flags", {}).get("set", {}))
    if (added_usage := fields.get("token_usage")) is not None:
        ctx.token_usage.add(TokenUsage.model_validate(added_usage))


def _subtract_usage(before: Any, after: Any) -> Any:
    """Subtract the token counts `before` from `after`, recursively."""
    if isinstance(after, dict):
        return {
            key: _subtract_usage(before.get(key) if before else None, value)
            for key, value in after.items()
        }
    return after - (before or 0)
