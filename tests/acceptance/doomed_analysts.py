"""The analysts of `examples/stock_analysis`, who write down what they do and die where they are told to.

Replicas import this by its bare name; a request tells where its task writes, and where its process dies.
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
import agents  # noqa: E402
import effects  # noqa: E402
import sources  # noqa: E402

sources.deal_service.quota = 1000
sources.deal_service.an_hour_passes()


class Doom(BaseModel):
    """An analysis. `diary` is a file that gets a line when a subtask's code begins, and one when it has completed.

    The process dies inside subtask `at`, when its code has begun for the `time`-th time.
    """

    analysis: agents.Analysis
    diary: Path
    at: str | None = None
    time: int = 1


class Diary:
    """A listener. Its lines are on the disk before the code goes on."""

    def __init__(self, doom: Doom) -> None:
        self._doom = doom

    def __call__(self, subtask: str, what: str) -> None:
        with self._doom.diary.open("a+") as file:
            file.write(f"{os.getpid()} {subtask} {what}\n")
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            times = sum(line.split()[1:] == [subtask, "began"] for line in file)
        if (subtask, what, times) == (self._doom.at, "began", self._doom.time):
            os.kill(os.getpid(), signal.SIGKILL)


def doomed(analyst: FunctionAgent[agents.Analysis, Any]) -> FunctionAgent[Doom, Any]:
    """The same agent, with a diary. A process has one task at a time, so the last diary is its diary."""

    async def analyse(ctx: TaskExecutionContext, doom: Doom) -> Any:
        effects.listeners[:] = [Diary(doom)]
        return await analyst.function(ctx, doom.analysis)

    return FunctionAgent(analyse, analyst.name, version=analyst.version, plan=analyst.plan)


financial_analyst = doomed(agents.financial_analyst)
strategy_analyst = doomed(agents.strategy_analyst)
valuation_agent = doomed(agents.valuation_agent)
company_data = agents.company_data
