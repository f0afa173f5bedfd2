"""What every assistant shares: two peers, a tool, and the script of the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from meshpoint import TaskExecutionContext, agent

LEDGER = "TRAVEL_LEDGER"
"""The variable that names a file, which gets a line for each call: its process, and its name."""
INSTRUCTIONS = """\
Ask flights and hotels for their prices, both at once. Then book the city for the total price.
Then report the booking in one sentence."""


class Trip(BaseModel):
    city: str
    days: int = 2


@agent("flights")
async def flights(ctx: TaskExecutionContext, trip: Trip) -> int:
    """Finds the price of a flight."""
    record("flights")
    return 120


@agent("hotels")
async def hotels(ctx: TaskExecutionContext, trip: Trip) -> int:
    """Finds the price of a hotel."""
    record("hotels")
    return 60 * trip.days


def book(city: str, price: int) -> str:
    """Books the flight and the hotel."""
    record("book")
    return f"{city} is booked for {price} EUR"


class ToolCall(NamedTuple):
    """A call that the model makes."""

    tool: str
    arguments: dict[str, Any]


def next_turn(results: Mapping[str, str]) -> list[ToolCall] | str:
    """The model's calls, or its last text, given the results so far by tool."""
    record("model")
    if "book" in results:
        return f"{results['book']}. Have a good trip!"
    if results:
        price = int(results["flights"]) + int(results["hotels"])
        return [ToolCall("book", {"city": "Rome", "price": price})]
    return [ToolCall(peer, {"city": "Rome", "days": 2}) for peer in ("flights", "hotels")]


def record(call: str) -> None:
    """Add a line to the ledger, if `LEDGER` is set."""
    if path := os.environ.get(LEDGER):
        with Path(path).open("a", encoding="utf-8") as ledger:
            ledger.write(f"{os.getpid()} {call}\n")
