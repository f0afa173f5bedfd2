"""Cancels that cannot be kept: each is a dead letter, and its neighbours are carried out."""

from __future__ import annotations

import pytest

from meshpoint.errors import PoisonMessage
from meshpoint.lifecycle import receive
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.letters import cancel_message
from meshpoint.model.options import Options


@pytest.mark.parametrize("sender", ["a\0b", "x" * 249, "a\x1bb"])
def test_a_sender_that_no_row_can_keep(sender: str) -> None:
    """An early cancel is stored with its sender, and PostgreSQL refuses a statement for one zero byte."""
    with pytest.raises(PoisonMessage, match="app_id"):
        receive.cancelled_task(cancel_message(AgentName(sender), TaskId("task")), Options())
