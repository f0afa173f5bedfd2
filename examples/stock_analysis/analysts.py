"""Three analysts of one stock, each with its own subtasks, and a peer with company data.

A subtask runs once: its deliverable is stored before the next one begins, so a failed analysis
resumes after it.
"""

from __future__ import annotations

from statistics import mean, median

from effects import counted
from pydantic import BaseModel
from sources import Deal, Market, Statement, deal_service, market_of, proxy_of, statements_of

from meshpoint import Peer, TaskExecutionContext, agent


class Analysis(BaseModel):
    """The order: a company by its ticker."""

    ticker: str


# ── the figures of other companies ───────────────────────────────────────────────────────────────


class Ratios(BaseModel):
    """A company's last fiscal year, as fractions."""

    gross_margin: float
    operating_margin: float
    return_on_capital: float
    return_on_equity: float
    cash_conversion: float
    debt_to_equity: float
    current_ratio: float


def ratios_of(last: Statement) -> Ratios:
    return Ratios(
        gross_margin=1 - last.cost_of_revenue / last.revenue,
        operating_margin=last.operating_income / last.revenue,
        return_on_capital=last.return_on_capital,
        return_on_equity=last.net_income / last.equity,
        cash_conversion=last.operating_cash_flow / (last.net_income + last.depreciation),
        debt_to_equity=last.debt / last.equity,
        current_ratio=last.current_assets / last.current_liabilities,
    )


@agent("company_data")
async def company_data(ctx: TaskExecutionContext, ticker: str) -> Ratios:
    """The ratios of any company."""
    return ratios_of(statements_of(ticker)[-1])


ask_company = Peer("company_data", str, Ratios)


# ── financial analyst ────────────────────────────────────────────────────────────────────────────


class Compared(BaseModel):
    """One ratio and the ratios of the peers. `rank` is 1 for the best."""

    value: float
    median_of_peers: float
    rank: int
    of: int


class FinancialReport(BaseModel):
    ratios: Ratios
    comparison: dict[str, Compared]
    red_flags: list[str]


@agent(
    "financial_analyst",
    subtasks=["10k_parsing", "ratio_calculation", "peer_comparison", "red_flag_detection"],
)
async def financial_analyst(ctx: TaskExecutionContext, analysis: Analysis) -> FinancialReport:
    """How good is the business, and can its figures be trusted?"""
    ctx.subject = analysis.ticker
    statements = await ctx.subtask("10k_parsing", parse_10k, analysis.ticker)
    ratios = await ctx.subtask("ratio_calculation", calculate_ratios, statements)
    comparison = await ctx.subtask(
        "peer_comparison", compare_with_peers, ctx, analysis.ticker, ratios
    )
    red_flags = await ctx.subtask("red_flag_detection", detect_red_flags, statements, comparison)
    return FinancialReport(ratios=ratios, comparison=comparison, red_flags=red_flags)


@counted("10k_parsing")
async def parse_10k(ticker: str) -> list[Statement]:
    return statements_of(ticker)


@counted("ratio_calculation")
async def calculate_ratios(statements: list[Statement]) -> Ratios:
    return ratios_of(statements[-1])


@counted("peer_comparison")
async def compare_with_peers(
    ctx: TaskExecutionContext, ticker: str, ratios: Ratios
) -> dict[str, Compared]:
    """Asks for all peers at once. While they answer, the analysis is a row in the database."""
    peers = await ctx.gather(*[ask_company(peer) for peer in market_of(ticker).peers])
    comparison = {}
    for name, value in ratios:
        peer_values = [getattr(peer, name) for peer in peers]
        better = [
            peer_value
            for peer_value in peer_values
            if (peer_value < value if name == "debt_to_equity" else peer_value > value)
        ]
        comparison[name] = Compared(
            value=value,
            median_of_peers=median(peer_values),
            rank=1 + len(better),
            of=1 + len(peer_values),
        )
    return comparison


@counted("red_flag_detection")
async def detect_red_flags(
    statements: list[Statement], comparison: dict[str, Compared]
) -> list[str]:
    before, last = statements[-2:]
    sales, receivables = (
        last.revenue / before.revenue - 1,
        last.receivables / before.receivables - 1,
    )
    flags = {
        f"receivables grew by {receivables:.0%}, sales by {sales:.0%}": receivables > 1.5 * sales,
        f"goodwill is {last.goodwill / last.equity:.0%} of equity": last.goodwill
        > 0.4 * last.equity,
        f"earnings of {last.net_income:.0f} are not matched by cash": last.operating_cash_flow
        < last.net_income,
        "more debt than any peer": comparison["debt_to_equity"].rank
        == comparison["debt_to_equity"].of,
    }
    return [flag for flag, raised in flags.items() if raised]


# ── strategy analyst ─────────────────────────────────────────────────────────────────────────────


class ReviewedDeal(BaseModel):
    target: str
    return_on_price: float
    destroyed_value: bool


class Compensation(BaseModel):
    pay_growth: float
    profit_growth: float
    tied_to_return_on_capital: float


class StrategyReport(BaseModel):
    """How the management uses the owners' money. `score` goes to 100."""

    returns_on_capital: dict[int, float]
    deals: list[ReviewedDeal]
    compensation: Compensation
    score: int


@agent(
    "strategy_analyst",
    subtasks=["historical_roi", "ma_review", "mgmt_compensation", "capital_allocation_scoring"],
)
async def strategy_analyst(ctx: TaskExecutionContext, analysis: Analysis) -> StrategyReport:
    """Does the management use the owners' money well?"""
    ctx.subject = analysis.ticker
    returns = await ctx.subtask("historical_roi", calculate_returns, analysis.ticker)
    deals = await ctx.subtask("ma_review", review_deals, ctx, analysis.ticker)
    compensation = await ctx.subtask("mgmt_compensation", review_compensation, analysis.ticker)
    score = await ctx.subtask(
        "capital_allocation_scoring", score_allocation, returns, deals, compensation
    )
    return StrategyReport(
        returns_on_capital=returns, deals=deals, compensation=compensation, score=score
    )


@counted("historical_roi")
async def calculate_returns(ticker: str) -> dict[int, float]:
    """The return on capital in each year that the filings cover."""
    return {each.year: each.return_on_capital for each in statements_of(ticker)}


@counted("ma_review")
async def review_deals(ctx: TaskExecutionContext, ticker: str) -> list[ReviewedDeal]:
    """Records each paid deal, so that none is requested twice after a rate limit."""
    known = [Deal.model_validate(deal) for deal in ctx.saved_progress or []]
    for name in deal_service.deals_of(ticker)[len(known) :]:
        known.append(await deal_service.deal(name))
        await ctx.save_progress([deal.model_dump() for deal in known])
    return [
        ReviewedDeal(
            target=deal.target,
            return_on_price=deal.profit / deal.price,
            destroyed_value=deal.impairment > 0 or deal.profit / deal.price < 0.05,
        )
        for deal in known
    ]


@counted("mgmt_compensation")
async def review_compensation(ticker: str) -> Compensation:
    proxy, statements = proxy_of(ticker), statements_of(ticker)
    pay = [proxy.chief_executive_pay[year] for year in sorted(proxy.chief_executive_pay)]
    return Compensation(
        pay_growth=pay[-1] / pay[0] - 1,
        profit_growth=statements[-1].net_income / statements[-len(pay)].net_income - 1,
        tied_to_return_on_capital=proxy.share_of_pay_tied_to.get("return on capital", 0),
    )


@counted("capital_allocation_scoring")
async def score_allocation(
    returns: dict[int, float], deals: list[ReviewedDeal], compensation: Compensation
) -> int:
    """40 points for the returns, 20 for their trend, 25 for acquisitions, 15 for incentives."""
    series = [returns[year] for year in sorted(returns)]
    level = min(mean(series) / 0.20, 1)
    trend = min(max(0.5 + 10 * (mean(series[-3:]) - mean(series[:3])), 0), 1)
    good_deals = mean(not deal.destroyed_value for deal in deals)
    fair_pay = compensation.pay_growth <= compensation.profit_growth
    incentives = 0.5 * fair_pay + 0.5 * min(compensation.tied_to_return_on_capital / 0.3, 1)
    return round(40 * level + 20 * trend + 25 * good_deals + 15 * incentives)


# ── valuation agent ──────────────────────────────────────────────────────────────────────────────


class Assumptions(BaseModel):
    """Growth by year, then for ever; margin before tax; sales for each unit of new capital."""

    growth: list[float]
    long_term_growth: float
    margin: float
    tax_rate: float
    sales_to_capital: float


class CostOfCapital(BaseModel):
    equity: float
    debt: float
    weight_of_equity: float
    wacc: float


class Valuation(BaseModel):
    """Per share.

    `scenarios`: by change of the cost of capital, and by change of long-term growth.
    """

    price: float
    value: float
    cost_of_capital: CostOfCapital
    scenarios: dict[str, dict[str, float]]

    @property
    def lowest(self) -> float:
        return min(value for row in self.scenarios.values() for value in row.values())

    @property
    def highest(self) -> float:
        return max(value for row in self.scenarios.values() for value in row.values())


@agent(
    "valuation_agent",
    subtasks=[
        "dcf_assumptions",
        "cash_flow_projection",
        "wacc_calculation",
        "terminal_value",
        "sensitivity_analysis",
    ],
)
async def valuation_agent(ctx: TaskExecutionContext, analysis: Analysis) -> Valuation:
    """What is the company worth?"""
    ctx.subject = analysis.ticker
    last, market = statements_of(analysis.ticker)[-1], market_of(analysis.ticker)
    assumptions = await ctx.subtask("dcf_assumptions", assume, analysis.ticker, market)
    cash_flows = await ctx.subtask(
        "cash_flow_projection", project_cash_flows, assumptions, last.revenue
    )
    cost = await ctx.subtask(
        "wacc_calculation", calculate_wacc, market, last.debt, assumptions.tax_rate
    )
    terminal = await ctx.subtask(
        "terminal_value", value_at_the_end, cash_flows, cost.wacc, market.long_term_growth
    )
    scenarios = await ctx.subtask(
        "sensitivity_analysis", vary, cash_flows, cost.wacc, market, last
    )
    value = value_per_share(cash_flows, terminal, cost.wacc, market, last)
    return Valuation(price=market.price, value=value, cost_of_capital=cost, scenarios=scenarios)


@counted("dcf_assumptions")
async def assume(ticker: str, market: Market) -> Assumptions:
    """Growth fades from the rate of the last three years to the long-term rate."""
    statements = statements_of(ticker)[-4:]
    first, last, years = statements[0], statements[-1], len(statements) - 1
    growth = (last.revenue / first.revenue) ** (1 / years) - 1
    step = (growth - market.long_term_growth) / 5
    return Assumptions(
        growth=[growth - step * year for year in range(1, 6)],
        long_term_growth=market.long_term_growth,
        margin=mean(each.operating_income / each.revenue for each in statements[1:]),
        tax_rate=last.tax_rate,
        sales_to_capital=last.revenue / last.invested_capital,
    )


@counted("cash_flow_projection")
async def project_cash_flows(assumptions: Assumptions, revenue: float) -> list[float]:
    """What is left for lenders and owners in each of the next years."""
    cash_flows = []
    for growth in assumptions.growth:
        invested = revenue * growth / assumptions.sales_to_capital
        revenue *= 1 + growth
        cash_flows.append(revenue * assumptions.margin * (1 - assumptions.tax_rate) - invested)
    return cash_flows


@counted("wacc_calculation")
async def calculate_wacc(market: Market, debt: float, tax_rate: float) -> CostOfCapital:
    equity = market.risk_free_rate + market.beta * market.equity_risk_premium
    after_tax = market.cost_of_debt * (1 - tax_rate)
    weight = market.price * market.shares / (market.price * market.shares + debt)
    wacc = weight * equity + (1 - weight) * after_tax
    return CostOfCapital(equity=equity, debt=after_tax, weight_of_equity=weight, wacc=wacc)


@counted("terminal_value")
async def value_at_the_end(cash_flows: list[float], wacc: float, growth: float) -> float:
    return perpetuity(cash_flows[-1], wacc, growth)


@counted("sensitivity_analysis")
async def vary(
    cash_flows: list[float], wacc: float, market: Market, last: Statement
) -> dict[str, dict[str, float]]:
    def value(more_cost: float, more_growth: float) -> float:
        cost, growth = wacc + more_cost, market.long_term_growth + more_growth
        return value_per_share(
            cash_flows, perpetuity(cash_flows[-1], cost, growth), cost, market, last
        )

    return {
        f"{cost:+.1%}": {f"{more:+.1%}": value(cost, more) for more in _STEPS} for cost in _STEPS
    }


_STEPS = (-0.005, 0.0, 0.005)


def perpetuity(cash_flow: float, wacc: float, growth: float) -> float:
    """The value, a year before it begins, of a cash flow that grows for ever."""
    return cash_flow * (1 + growth) / (wacc - growth)


def value_per_share(
    cash_flows: list[float], terminal: float, wacc: float, market: Market, last: Statement
) -> float:
    discounted = [cash_flow / (1 + wacc) ** year for year, cash_flow in enumerate(cash_flows, 1)]
    company = sum(discounted) + terminal / (1 + wacc) ** len(cash_flows)
    return (company - last.debt + last.cash) / market.shares
