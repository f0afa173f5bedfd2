"""The analysts of `examples/stock_analysis`, with a diary, and with a place where they die.

Replicas import this module by its bare name. The request names the diary file and the subtask in
which the process dies.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from meshpoint import FunctionAgent, TaskExecutionContext

EXAMPLE = Path(__file__).parents[2] / "examples" / "stock_analysis"
sys.path.insert(0, str(EXAMPLE))
import analysts  # noqa: E402
import effects  # noqa: E402
import sources  # noqa: E402

sources.deal_service.quota = 1000
sources.deal_service.reset_quota()


class DiaryRequest(BaseModel):
    """An analysis. `diary` gets a line when a subtask's code begins and when it completes.

    The process dies inside subtask `at`, when its code begins for the `time`-th time.
    """

    analysis: analysts.Analysis
    diary: Path
    at: str | None = None
    time: int = 1


class Diary:
    """Listener that syncs each line to disk before the code continues."""

    def __init__(self, request: DiaryRequest) -> None:
        self._request = request

    def __call__(self, subtask: str, what: str) -> None:
        with self._request.diary.open("a+") as file:
            file.write(f"{os.getpid()} {subtask} {what}\n")
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            times = sum(line.split()[1:] == [subtask, "began"] for line in file)
        if (subtask, what, times) == (self._request.at, "began", self._request.time):
            os.kill(os.getpid(), signal.SIGKILL)


def with_diary(analyst: FunctionAgent[analysts.Analysis, Any]) -> FunctionAgent[DiaryRequest, Any]:
    """The same agent with a diary; one per process, which runs one task at a time."""

    async def analyse(ctx: TaskExecutionContext, request: DiaryRequest) -> Any:
        effects.listeners[:] = [Diary(request)]
        return await analyst.function(ctx, request.analysis)

    return FunctionAgent(analyse, analyst.name, version=analyst.version, plan=analyst.plan)


financial_analyst = with_diary(analysts.financial_analyst)
strategy_analyst = with_diary(analysts.strategy_analyst)
valuation_agent = with_diary(analysts.valuation_agent)
company_data = analysts.company_data
