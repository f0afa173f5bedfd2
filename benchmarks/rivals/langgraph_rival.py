"""LangGraph with its PostgreSQL saver: `python -m benchmarks.rivals.langgraph_rival URL`.

A node for each peer interrupts, and one resume answers all of them. Everything runs in one process
without a transport, so answers are available at once. Durability is `exit`: state is written when
the graph pauses and ends, as in Meshpoint.
"""

from __future__ import annotations

import operator
import sys
from argparse import ArgumentParser
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypedDict
from uuid import uuid4

from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send, interrupt
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

from benchmarks.rivals import driver, job

_CONNECTIONS = 10


class State(TypedDict, total=False):
    """The root's state while it waits."""

    fan_out: int
    history: list[dict[str, Any]]
    answers: Annotated[list[str], operator.add]
    result: str


async def _begin(state: State) -> State:
    return {"history": list(job.history())}


def _fan_out(state: State) -> list[Send]:
    return [Send("ask", {"question": "what do you say?"}) for _ in range(state["fan_out"])]


async def _ask(question: Any) -> State:
    return {"answers": [interrupt(question)]}


async def _end(state: State) -> State:
    return {"result": job.summary(state["answers"])}


def _graph() -> StateGraph[State]:
    graph = StateGraph(State)
    graph.add_node("begin", _begin)
    graph.add_node("ask", _ask)
    graph.add_node("end", _end)
    graph.add_edge(START, "begin")
    graph.add_conditional_edges("begin", _fan_out, ["ask"])
    graph.add_edge("ask", "end")
    graph.add_edge("end", END)
    return graph


@asynccontextmanager
async def running(db_url: str, durability: Any) -> AsyncIterator[driver.Ask]:
    """Compile the graph in this process, and yield a function that runs one job."""
    options = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
    pool: AsyncConnectionPool[Any]
    async with AsyncConnectionPool(db_url, max_size=_CONNECTIONS, kwargs=options, open=False) as pool:
        saver = AsyncPostgresSaver(pool)
        await saver.setup()
        graph = _graph().compile(checkpointer=saver)

        async def ask(fan_out: int) -> object:
            thread: Any = {"configurable": {"thread_id": str(uuid4())}}
            paused = await graph.ainvoke({"fan_out": fan_out}, thread, durability=durability)
            answers = {each.id: job.answer() for each in paused["__interrupt__"]}
            ended = await graph.ainvoke(Command(resume=answers), thread, durability=durability)
            return ended["result"]

        yield ask


def main() -> None:
    """Serve the driver."""
    arguments = ArgumentParser()
    arguments.add_argument("db_url")
    arguments.add_argument("--durability", default="exit", choices=["exit", "async", "sync"])
    options = arguments.parse_args(sys.argv[1:])
    driver.serve(running(options.db_url, options.durability))


if __name__ == "__main__":
    main()
