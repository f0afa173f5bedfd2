"""Examine a configuration before its deploy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta

from meshpoint import wiring
from meshpoint.doctor.broker_checks import (
    check_arguments,
    check_checkpointing,
    check_dead_letters,
    check_markers,
    check_rights,
)
from meshpoint.doctor.database_checks import (
    check_clocks,
    check_database_keys,
    check_databases,
    check_redis,
)
from meshpoint.doctor.encryption_checks import check_encryption
from meshpoint.doctor.facts import FactReader, Facts, OnStep, load_release
from meshpoint.doctor.findings import Finding, Severity, error, note, unavailable
from meshpoint.doctor.task_checks import (
    check_code,
    check_dead,
    check_formats,
    check_lost_replicas,
    check_parked,
    check_peers,
    check_removed_agents,
    check_replicas,
    check_suspended,
)
from meshpoint.errors import ConfigurationError, Unavailable
from meshpoint.model.error_text import quantity
from meshpoint.model.ids import AgentName
from meshpoint.ports.clock import Clock
from meshpoint.settings import Settings, StoreSettings

CHECKS: Sequence[Callable[[Facts], list[Finding]]] = (
    check_databases,
    check_database_keys,
    check_encryption,
    check_rights,
    check_markers,
    check_formats,
    check_parked,
    check_removed_agents,
    check_peers,
    check_redis,
    check_clocks,
    check_code,
    check_checkpointing,
    check_arguments,
    check_suspended,
    check_dead,
    check_dead_letters,
    check_replicas,
    check_lost_replicas,
)
"""Pure functions of the facts. Each returns its findings."""


async def examine(
    settings: Settings,
    *,
    timeout: timedelta,
    others: Sequence[StoreSettings] = (),
    clock: Clock | None = None,
    on_step: OnStep = lambda step: None,
    remove_marker: AgentName | None = None,
) -> list[Finding]:
    """Return what a deploy of `settings` would do, worst first.

    Args:
        settings: The configuration.
        timeout: Limit for each request to a server.
        others: Further databases whose tasks to count.
        clock: This host's clock.
        on_step: Called with a description of what is read next.
        remove_marker: Remove the database marker of this agent, if no replica serves it and no
            task of it is left. Nothing else is ever changed.

    Raises:
        ConfigurationError: The code of an agent cannot be loaded, or `remove_marker` names an
            agent that is not configured.
    """
    releases = [load_release(agent) for agent in settings.agents]
    if remove_marker is not None and remove_marker not in [each.name for each in releases]:
        names = ", ".join(each.name for each in releases) or "none"
        raise ConfigurationError(
            "--remove-marker", f"no agent {remove_marker!r} is configured", f"name one of: {names}"
        )
    reader = FactReader(
        settings,
        releases,
        timeout=timeout,
        others=others,
        clock=clock or wiring.make_clock(),
        on_step=on_step,
    )
    facts = await reader.read()
    removed = []
    if remove_marker is not None:
        removed.append(await _remove_marker(facts, remove_marker, timeout))
    findings = [*facts.failures, *removed, *(each for check in CHECKS for each in check(facts))]
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


async def _remove_marker(facts: Facts, agent: AgentName, timeout: timedelta) -> Finding:
    """Remove the marker of `agent` if that is safe. The facts then say that it is gone."""
    if problem := _reason_to_keep_marker(facts, agent):
        fix = "see the deploy page: switch off, wait until no task is left, stop all replicas"
        return error("marker.kept", agent, f"its marker was not removed: {problem}", fix)
    broker = wiring.make_broker(facts.settings.mesh)
    try:
        async with asyncio.timeout(timeout.total_seconds()):
            await broker.open()
            await broker.remove_database_marker(agent)
    except (Unavailable, TimeoutError) as failure:
        problem = f"its marker may not be removed: {failure or 'no answer in time'}"
        return unavailable("marker.kept", agent, problem, "run the command again")
    finally:
        await broker.close()
    if facts.broker is not None:
        facts.broker[agent].has_marker = False
    return note("marker.removed", agent, "its marker was removed")


def _reason_to_keep_marker(facts: Facts, agent: AgentName) -> str | None:
    if facts.failures or facts.broker is None:
        return "not all servers answered"
    if not facts.broker[agent].has_marker:
        return "it is not set"
    if replicas := facts.broker[agent].replicas:
        return f"{quantity(replicas, 'replica')} serving the agent"
    schemas = [database.schema for database in facts.databases.values()]
    if all(schema is None or schema.is_missing for schema in schemas):
        return "no database with tables is known: add --db URL, so that its tasks can be counted"
    left = sum(
        tasks.count
        for database in facts.databases.values()
        for name, tasks in database.tasks.items()
        if name == agent
    )
    return f"{quantity(left, 'task')} left in the database" if left else None
