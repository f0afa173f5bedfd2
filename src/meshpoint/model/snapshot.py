"""Snapshots of the values that agent code sets on a context, and their differences."""

from __future__ import annotations

from typing import Any

from meshpoint.model.checkpoint import Checkpoint
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.usage import Tokens, TokenUsage

_LISTS = ("produced_artifacts", "artifact_signals_to_return")


def snapshot(ctx: TaskExecutionContext) -> Checkpoint:
    """Copy the values that agent code can set on a context."""
    return {
        "response_buffer": ctx.response_buffer,
        "produced_artifacts": ctx.produced_artifacts.to_plain(),
        "artifact_signals_to_return": ctx.artifact_signals_to_return.to_plain(),
        "flags": ctx.flags.to_plain(),
        "token_usage": ctx.token_usage.model_dump(mode="json"),
    }


def rewind(ctx: TaskExecutionContext, to: Checkpoint) -> None:
    """Restore a snapshot in place, because agent code may hold references to the containers."""
    ctx.response_buffer = str(to["response_buffer"])
    for name in _LISTS:
        getattr(ctx, name)[:] = to[name]
    ctx.flags.clear()
    ctx.flags.update(to["flags"])
    set_usage(ctx, TokenUsage.model_validate(to["token_usage"]))


def set_usage(ctx: TaskExecutionContext, usage: TokenUsage) -> None:
    for name in TokenUsage.model_fields:
        setattr(ctx.token_usage, name, getattr(usage, name))


def changes(before: Checkpoint, after: Checkpoint) -> Checkpoint:
    """The changes between two snapshots, in a form that `change` can apply to another context.

    Additions are recorded as additions, because other code may have added values at the same time.
    Returns `{}` if nothing changed.
    """
    done: dict[str, Any] = {}
    earlier: Any
    later: Any
    for name in ("response_buffer", *_LISTS):
        earlier, later = before[name], after[name]
        if later != earlier:
            added = later[: len(earlier)] == earlier
            done[name] = {"add": later[len(earlier) :]} if added else {"set": later}
    earlier, later = before["flags"], after["flags"]
    if later != earlier:
        same = {key for key in later if key in earlier and later[key] == earlier[key]}
        done["flags"] = {
            "set": {key: value for key, value in later.items() if key not in same},
            "gone": [key for key in earlier if key not in later],
        }
    if after["token_usage"] != before["token_usage"]:
        done["token_usage"] = _used(before["token_usage"], after["token_usage"])
    return done


def change(ctx: TaskExecutionContext, done: Checkpoint) -> None:
    """Apply the result of `changes` to `ctx` in place."""
    told: Any = done
    for name in ("response_buffer", *_LISTS):
        match told.get(name):
            case {"add": added}:
                setattr(ctx, name, getattr(ctx, name) + added)
            case {"set": value}:
                setattr(ctx, name, value)
    for key in told.get("flags", {}).get("gone", ()):
        ctx.flags.pop(key, None)
    ctx.flags.update(told.get("flags", {}).get("set", {}))
    if (used := told.get("token_usage")) is not None:
        counted, more = ctx.token_usage, TokenUsage.model_validate(used)
        counted.total.add(more.total)
        for mine, theirs in ((counted.by_model, more.by_model), (counted.by_source, more.by_source)):
            for name, tokens in theirs.items():
                mine.setdefault(name, Tokens()).add(tokens)


def _used(before: Any, after: Any) -> Any:
    """Subtract the token counts `before` from `after`, recursively."""
    if isinstance(after, dict):
        return {key: _used(before.get(key) if before else None, value) for key, value in after.items()}
    return after - (before or 0)
