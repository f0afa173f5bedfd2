"""Where the figures come from: here files, elsewhere services that cost money and have limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

_DATA = Path(__file__).parent / "data"


class Statement(BaseModel):
    """One fiscal year of a company, in millions."""

    year: int
    revenue: float
    cost_of_revenue: float
    operating_income: float
    interest: float
    tax: float
    net_income: float
    depreciation: float
    capital_expenditures: float
    operating_cash_flow: float
    cash: float
    receivables: float
    current_assets: float
    goodwill: float
    assets: float
    current_liabilities: float
    debt: float
    equity: float

    @property
    def tax_rate(self) -> float:
        return self.tax / (self.net_income + self.tax)

    @property
    def invested_capital(self) -> float:
        return self.debt + self.equity - self.cash

    @property
    def return_on_capital(self) -> float:
        """After tax, on all that lenders and owners have put in."""
        return self.operating_income * (1 - self.tax_rate) / self.invested_capital


class Market(BaseModel):
    """What the market says of a company. Rates are fractions, `shares` are millions."""

    price: float
    shares: float
    beta: float
    risk_free_rate: float
    equity_risk_premium: float
    cost_of_debt: float
    long_term_growth: float
    peers: list[str]


class Proxy(BaseModel):
    """Management pay: millions by year, and the fractions of the variable part by metric."""

    chief_executive_pay: dict[int, float]
    share_of_pay_tied_to: dict[str, float]
    shares_held_by_management: float


class Deal(BaseModel):
    """A company that was bought; `profit` is what it earns now."""

    deal: str
    target: str
    year: int
    price: float
    profit: float
    impairment: float


class RateLimited(Exception):
    """The service takes no more requests for now."""


class DealService:
    """A service for data on acquisitions that answers `quota` requests an hour."""

    def __init__(self, quota: int) -> None:
        self.quota = quota
        self.answered = self.refused = 0
        self._remaining = quota

    def reset_quota(self) -> None:
        """The quota counts from zero again."""
        self._remaining = self.quota

    def deals_of(self, ticker: str) -> list[str]:
        """Names of deals, from a public register: without a limit."""
        return [deal["deal"] for deal in _read("deals")[ticker]]

    async def deal(self, name: str) -> Deal:
        """What is known of one deal.

        Raises:
            RateLimited: the quota is used up.
        """
        if self._remaining == 0:
            self.refused += 1
            raise RateLimited(f"429 Too Many Requests: {self.quota} an hour")
        self._remaining -= 1
        self.answered += 1
        ticker = name.partition("-")[0]
        return next(
            Deal.model_validate(entry) for entry in _read("deals")[ticker] if entry["deal"] == name
        )


deal_service = DealService(quota=3)

_CONCEPTS = {
    "revenue": "Revenues",
    "cost_of_revenue": "CostOfRevenue",
    "operating_income": "OperatingIncomeLoss",
    "interest": "InterestExpense",
    "tax": "IncomeTaxExpense",
    "net_income": "NetIncomeLoss",
    "depreciation": "DepreciationAndAmortization",
    "capital_expenditures": "CapitalExpenditures",
    "operating_cash_flow": "NetCashFromOperations",
    "cash": "Cash",
    "receivables": "AccountsReceivable",
    "current_assets": "CurrentAssets",
    "goodwill": "Goodwill",
    "assets": "Assets",
    "current_liabilities": "CurrentLiabilities",
    "debt": "Debt",
    "equity": "StockholdersEquity",
}


def statements_of(ticker: str) -> list[Statement]:
    """The statements in a company's filing, oldest first.

    Raises:
        ValueError: its income statement does not add up.
    """
    filing = _read(f"10-k-{ticker.lower()}")
    years = [
        Statement(
            year=year,
            **{name: filing["facts"][concept][index] for name, concept in _CONCEPTS.items()},
        )
        for index, year in enumerate(filing["fiscal_years"])
    ]
    for each in years:
        if abs(each.operating_income - each.interest - each.tax - each.net_income) > 1:
            raise ValueError(f"{ticker}: the income statement of {each.year} does not add up")
    return years


def market_of(ticker: str) -> Market:
    return Market.model_validate(_read("market")[ticker])


def proxy_of(ticker: str) -> Proxy:
    return Proxy.model_validate(_read("proxy")[ticker])


def _read(name: str) -> Any:
    return json.loads((_DATA / f"{name}.json").read_text(encoding="utf-8"))
