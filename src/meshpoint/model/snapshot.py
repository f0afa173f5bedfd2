"""What agent code sets on a context: taken, and put back."""

from __future__ import annotations

from meshpoint.model.checkpoint import Checkpoint
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.usage import TokenUsage


def snapshot(ctx: TaskExecutionContext) -> Checkpoint:
    """What agent code sets on a context, as a copy."""
    return {
        "response_buffer": ctx.response_buffer,
        "produced_artifacts": ctx.produced_artifacts.to_plain(),
        "artifact_signals_to_return": ctx.artifact_signals_to_return.to_plain(),
        "flags": ctx.flags.to_plain(),
        "token_usage": ctx.token_usage.model_dump(mode="json"),
    }


def rewind(ctx: TaskExecutionContext, to: Checkpoint) -> None:
    """Put back what `snapshot` took, in place: code may hold on to a list or the usage."""
    ctx.response_buffer = str(to["response_buffer"])
    for name in ("produced_artifacts", "artifact_signals_to_return"):
        getattr(ctx, name)[:] = to[name]
    ctx.flags.clear()
    ctx.flags.update(to["flags"])
    set_usage(ctx, TokenUsage.model_validate(to["token_usage"]))


def set_usage(ctx: TaskExecutionContext, usage: TokenUsage) -> None:
    for name in TokenUsage.model_fields:
        setattr(ctx.token_usage, name, getattr(usage, name))
