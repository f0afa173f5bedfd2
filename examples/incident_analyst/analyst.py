"""The incident analyst: finds a cause, proposes a rollback, and checks again three days later."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime

from incident import (
    DAY,
    Decision,
    Draft,
    Finding,
    Incident,
    Report,
    approval,
    ask_changes,
    ask_critic,
    ask_logs,
    ask_metrics,
)

from meshpoint import Context, agent

logger = logging.getLogger("incident_analyst")


@agent("analyst")
async def analyst(ctx: Context, incident: Incident) -> Report:
    """At each `await` of a peer, a person or time, the task is only a row in the database."""
    await note(ctx, "investigating")
    service = incident.service
    findings = await ctx.gather(ask_logs(service), ask_metrics(service), ask_changes(service))
    draft = await convince_critic(ctx, incident, findings)
    decision, reminders = await ask_manager(ctx, draft)
    follow_up = None
    if decision.approved:
        await ctx.step("roll back", roll_back, service, ctx.task_id)
        await note(ctx, "rolled back")
        await ctx.sleep(3 * DAY)
        follow_up = (await ask_metrics(service)).text
        await note(ctx, "followed up")
    timeline = [entry.decode() for entry in await ctx.memory.lrange("timeline")]
    return Report(
        cause=draft.cause,
        written_at=draft.written_at,
        decision=decision,
        reminders=reminders,
        follow_up=follow_up,
        timeline=timeline,
    )


async def note(ctx: Context, event: str) -> None:
    """Keep `event` in the working memory, and send it as a status update."""
    await ctx.memory.rpush("timeline", event)
    await ctx.update_status(event)


async def convince_critic(ctx: Context, incident: Incident, findings: Sequence[Finding]) -> Draft:
    """Write drafts until the critic has no objection left."""
    objections: list[str] = []
    while True:
        draft = await ctx.step("write", write_draft, incident, findings, objections)
        objection = (await ask_critic(draft)).objection
        if objection is None:
            return draft
        objections.append(objection)
        await note(ctx, f"objection: {objection}")


async def ask_manager(ctx: Context, draft: Draft) -> tuple[Decision, int]:
    """Wait for a decision, and remind the manager once a day."""
    wait = ctx.wait_for(approval, prompt=f"{draft.cause}: roll back?", timeout=DAY)
    await ctx.step("page", page, f"please decide, question {wait.id}")
    reminders = 0
    while True:
        try:
            decision = await wait
        except TimeoutError:
            reminders += 1
            await ctx.step("page", page, f"reminder {reminders}, question {wait.id}")
        else:
            await note(ctx, f"{'approved' if decision.approved else 'refused'} by {decision.by}")
            return decision, reminders


def write_draft(
    incident: Incident, findings: Sequence[Finding], objections: Sequence[str]
) -> Draft:
    """A stand-in for a model call: slow, billed and different each time, so it is a step."""
    cause = f"{incident.summary}: {findings[-1].text}"
    answers = [f"{objection} {findings[0].text}" for objection in objections]
    return Draft(incident=incident, cause=cause, answers=answers, written_at=datetime.now(UTC))


def page(text: str) -> None:
    """A stand-in for paging the manager."""
    logger.warning("page: %s", text)


def roll_back(service: str, key: str) -> None:
    """Roll back. A step may run twice if a replica dies in it, so `key` makes it idempotent."""
    logger.warning("rolling back %s, idempotency key %s", service, key)
