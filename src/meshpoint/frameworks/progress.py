"""What the callers of a task see while a framework runs."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

from meshpoint.errors import NotJson
from meshpoint.model.context import TaskExecutionContext


async def show_text(task: TaskExecutionContext, text: str) -> None:
    """Send a fragment of the model's text. Invalid Unicode is left out."""
    if text:
        with suppress(NotJson):
            await task.add_text(text)


async def show_tool(
    task: TaskExecutionContext, tool: str, state: Literal["called", "answered"]
) -> None:
    """Send that a tool was called, or has answered."""
    await task.update_status({"tool": tool, "state": state})
