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


async def _start_node(state: State) -> State:
    return {"history": list(job.history())}


def _send_to_peers(state: State) -> list[Send]:
    return [Send("ask", {"question": job.QUESTION}) for _ in range(state["fan_out"])]


async def _peer_node(state: Any) -> State:
    return {"answers": [interrupt(state)]}


async def _end_node(state: State) -> State:
    return {"result": job.summary(state["answers"])}


def _graph() -> StateGraph[State]:
    graph = StateGraph(State)
    graph.add_node("begin", _start_node)
    graph.add_node("ask", _peer_node)
    graph.add_node("end", _end_node)
    graph.add_edge(START, "begin")
    graph.add_conditional_edges("begin", _send_to_peers, ["ask"])
    graph.add_edge("ask", "end")
    graph.add_edge("end", END)
    return graph


@asynccontextmanager
async def running(db_url: str, durability: Any) -> AsyncIterator[driver.Ask]:
    """Compile the graph in this process, and yield a function that runs one job."""
    options = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
    pool: AsyncConnectionPool[Any]
    async with AsyncConnectionPool(
        db_url, max_size=_CONNECTIONS, kwargs=options, open=False
    ) as pool:
        saver = AsyncPostgresSaver(pool)
        await saver.setup()
        graph = _graph().compile(checkpointer=saver)

        async def ask(fan_out: int) -> object:
            thread: Any = {"configurable": {"thread_id": str(uuid4())}}
            paused = await graph.ainvoke({"fan_out": fan_out}, thread, durability=durability)
            answers = {part.id: job.answer() for part in paused["__interrupt__"]}
            ended = await graph.ainvoke(Command(resume=answers), thread, durability=durability)
            return ended["result"]

        yield ask


def main() -> None:
    """Serve the driver."""
    parser = ArgumentParser()
    parser.add_argument("db_url")
    parser.add_argument("--durability", default="exit", choices=["exit", "async", "sync"])
    options = parser.parse_args(sys.argv[1:])
    driver.serve(running(options.db_url, options.durability))


if __name__ == "__main__":
    main()
