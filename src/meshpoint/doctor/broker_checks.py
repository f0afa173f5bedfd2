"""Findings about the broker, and about switching where tasks are stored."""

from __future__ import annotations

from meshpoint.doctor.facts import BrokerAgentFacts, Facts, Release
from meshpoint.doctor.findings import CONFIG, Finding, error, note, warning
from meshpoint.model.error_text import quantity
from meshpoint.ports.inspection import MissingRight


def check_rights(facts: Facts) -> list[Finding]:
    """Rights that replicas need and the login lacks."""
    return [
        _missing_right(release, missing)
        for release, found in _configured(facts)
        for missing in found.missing_rights
    ]


def _missing_right(release: Release, missing: MissingRight) -> Finding:
    problem = f"the login may not {missing.right} the {missing.object}"
    name = missing.object.partition(" ")[2]
    fix = f"grant it {missing.right} on that name (rabbitmqctl set_permissions)"
    if missing.is_needed:
        return error(
            "broker.right", release.name, problem, fix, right=missing.right.value, object=name
        )
    problem += ", which keeps replicas without a database away"
    return warning(
        "broker.right", release.name, problem, fix, right=missing.right.value, object=name
    )


def check_arguments(facts: Facts) -> list[Finding]:
    """Queues that exist with other arguments: replicas use them as they are."""
    return [
        note(
            "broker.arguments",
            release.name,
            f"the queue {other.queue} keeps its own arguments ({other.difference})",
            f"to bring it up to date: {other.policy}" if other.policy else "",
            queue=other.queue,
            difference=other.difference,
            policy=other.policy,
        )
        for release, found in _configured(facts)
        for other in found.other_arguments
    ]


def check_dead_letters(facts: Facts) -> list[Finding]:
    """Dead letters of each agent."""
    return [
        note(
            "broker.dead_letters",
            release.name,
            f"{quantity(found.dead_letters, 'dead letter')} in {release.name}.dlq",
            f"run: meshpoint dead list --agent {release.name} --config {CONFIG}",
            messages=found.dead_letters,
        )
        for release, found in _configured(facts)
        if found.dead_letters
    ]


def check_markers(facts: Facts) -> list[Finding]:
    """What a changed `session_service` does."""
    findings: list[Finding] = []
    for release, found in _configured(facts):
        if release.settings.has_database:
            findings += _check_with_database(release, found)
        elif found.has_marker:
            findings.append(_refused(facts, release, found))
    return findings


def _check_with_database(release: Release, found: BrokerAgentFacts) -> list[Finding]:
    if found.has_marker or not found.replicas:
        return []
    problem = (
        f"{quantity(found.replicas, 'replica')} without a database, or of an earlier release: "
        "the first replica of this configuration makes those without a database drain and exit, "
        "and the tasks in their memory run again from the start"
    )
    fix = (
        "start new replicas first; replace all replicas of an earlier release "
        "before you switch stateless_checkpointing"
    )
    return [warning("marker.new", release.name, problem, fix, replicas=found.replicas)]


def _refused(facts: Facts, release: Release, found: BrokerAgentFacts) -> Finding:
    left = facts.tasks(release).count
    known = f"{quantity(left, 'task')} left there" if facts.databases else "tasks there unknown"
    problem = (
        "replicas of this configuration refuse to start: others store their tasks in a database "
        f"({known}; {quantity(found.replicas, 'replica')} now)"
    )
    fix = (
        "use session_service: sql with their session_db_url; or, when no task is left and all "
        "replicas are stopped, run: "
        f"meshpoint doctor {CONFIG} --db URL --remove-marker {release.name}"
    )
    return error(
        "marker.refuses", release.name, problem, fix,
        tasks=left if facts.databases else None, replicas=found.replicas,
    )  # fmt: skip


def check_checkpointing(facts: Facts) -> list[Finding]:
    """Where new tasks are stored, and what becomes of those in the database."""
    findings: list[Finding] = []
    for release in facts.releases:
        if release.settings.stateless_checkpointing:
            continue
        left = facts.tasks(release).count if release.settings.has_database else 0
        problem = (
            "stateless_checkpointing is off: new tasks live in the memory of one replica, "
            "and run again from the start if it dies"
        )
        if left:
            problem += f"; {quantity(left, 'task')} in the database end there"
        findings.append(note("checkpointing.off", release.name, problem, tasks=left))
    return findings


def _configured(facts: Facts) -> list[tuple[Release, BrokerAgentFacts]]:
    """The configured agents with what is known of them at the broker."""
    return [
        (release, facts.broker[release.name])
        for release in facts.releases
        if facts.broker is not None and release.name in facts.broker
    ]
