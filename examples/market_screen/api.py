"""A service that sells company pages: simulated here, slow and paid per request in practice."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path

BILL = "MARKET_SCREEN_BILL"
"""The variable that names a file, which gets a line for each page: who bought it, and what."""

_SECTORS = ("energy", "health", "industry", "software", "trade")


def tickers(count: int) -> list[str]:
    """Names of companies, from a public register: for nothing."""
    return [f"M{number:03d}" for number in range(count)]


async def fetch(ticker: str) -> bytes:
    """The page of a company, as JSON. Each call is on the bill, for ever."""
    _add_to_bill(ticker)
    await asyncio.sleep(0.001)  # the time that a network takes
    chance = random.Random(ticker)
    page = {
        "ticker": ticker,
        "sector": chance.choice(_SECTORS),
        "price": round(chance.uniform(5, 200), 2),
        "earnings": round(chance.uniform(-2, 15), 2),
        "debt_to_equity": round(chance.uniform(0, 3), 2),
    }
    return json.dumps(page).encode()


def _add_to_bill(ticker: str) -> None:
    with Path(os.environ[BILL]).open("a", encoding="utf-8") as bill_path:
        bill_path.write(f"{os.getpid()} {ticker}\n")
