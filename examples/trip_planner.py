"""A planner asks three peers at once.

One is slow, one never answers; the plan says what is missing.

Run it: `python examples/trip_planner.py`.

The mesh stops the code whose result is no longer needed, and logs `code_cancelled`.
"""

import asyncio
from datetime import timedelta

from pydantic import BaseModel

from meshpoint import Failed, Ok, Peer, TaskExecutionContext, agent
from meshpoint.local import local_mesh


class Trip(BaseModel):
    city: str
    days: int


class Itinerary(BaseModel):
    city: str
    plan: list[str]
    missing: list[str]


@agent("flights")
async def flights(ctx: TaskExecutionContext, trip: Trip) -> str:
    return f"flight to {trip.city}, 120 EUR"


@agent("hotels")
async def hotels(ctx: TaskExecutionContext, trip: Trip) -> str:
    await asyncio.sleep(1)
    return f"{trip.days} nights at the Albergo Sole, {trip.days * 90} EUR"


@agent("weather")
async def weather(ctx: TaskExecutionContext, trip: Trip) -> str:
    await asyncio.sleep(3600)
    return "never returned"


ask_flights = Peer("flights", Trip, str)
ask_hotels = Peer("hotels", Trip, str)
ask_weather = Peer("weather", Trip, str, timeout=timedelta(seconds=2))


@agent("planner")
async def planner(ctx: TaskExecutionContext, trip: Trip) -> Itinerary:
    calls = [ask_flights(trip), ask_hotels(trip), ask_weather(trip)]
    answers = await ctx.gather_outcomes(*calls)
    missing = [
        f"{call.peer}: {answer.kind}"
        for call, answer in zip(calls, answers, strict=True)
        if isinstance(answer, Failed)
    ]
    return Itinerary(
        city=trip.city,
        plan=[answer.value for answer in answers if isinstance(answer, Ok)],
        missing=missing,
    )


async def main() -> None:
    async with local_mesh(planner, flights, hotels, weather) as mesh:
        itinerary = await mesh.call(planner, Trip(city="Rome", days=3))
    print(f"{itinerary.city}:")
    for line in itinerary.plan:
        print(f"  - {line}")
    for line in itinerary.missing:
        print(f"  ! no answer from {line}")


if __name__ == "__main__":
    asyncio.run(main())
