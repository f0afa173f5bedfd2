"""Findings about the tasks in the databases: who can continue them, and what holds them up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pydantic import JsonValue

from meshpoint._version import __version__
from meshpoint.doctor.facts import Facts, Release
from meshpoint.doctor.findings import CONFIG, Finding, note, warning
from meshpoint.model.error_text import quantity
from meshpoint.model.ids import AgentName
from meshpoint.model.replicas import RegisteredReplica, ReplicaState
from meshpoint.model.secrets import mask_secrets
from meshpoint.model.tasks import TaskState, plain_format
from meshpoint.ports.inspection import AgentTasks, TaskGroup

_MAX_REASON = 300


def check_formats(facts: Facts) -> list[Finding]:
    """Tasks that this configuration's code cannot read, or reads with an older version."""
    findings: list[Finding] = []
    for release in facts.releases:
        groups = facts.tasks(release).groups
        by_format: dict[str, list[TaskGroup]] = {}
        for group in groups:
            if group.state_format is not None:
                by_format.setdefault(group.state_format, []).append(group)
        for state_format, members in sorted(by_format.items()):
            if state_format not in release.formats:
                findings.append(_unread(facts, release, state_format, members))
            elif plain_format(state_format) != release.newest:
                findings.append(_older(release, state_format, members))
    return findings


def _unread(facts: Facts, release: Release, state_format: str, groups: list[TaskGroup]) -> Finding:
    count = _count(groups)
    running = facts.replicas(release.name)
    keep = (
        "keep replicas of the version that reads it until these tasks have ended, or list both: "
        "entrypoint: [new, old]"
    )
    problem = (
        f"{quantity(count, 'task')} in the format {state_format} (paused by {_versions(groups)}): "
        f"no entrypoint reads it; new tasks have {release.newest}"
    )
    readers = _live(
        each for each in facts.registered(release.name) if state_format in each.formats
    )
    if readers:
        problem += f"; running replicas read it ({_app_versions(readers)})"
    return warning(
        "tasks.unread", release.name, problem, keep,
        readers=[each.id for each in readers],
        format=state_format, tasks=count, states=_states(groups),
        versions=_version_names(groups), replicas=running,
    )  # fmt: skip


def _older(release: Release, state_format: str, groups: list[TaskGroup]) -> Finding:
    count = _count(groups)
    problem = (
        f"{quantity(count, 'task')} in the format {state_format}: an older version in entrypoint, "
        f"or code that reads older formats, continues them; new tasks have {release.newest}"
    )
    fix = "keep it until these tasks have ended"
    return note(
        "tasks.older", release.name, problem, fix,
        format=state_format, tasks=count, states=_states(groups),
    )  # fmt: skip


def check_code(facts: Facts) -> list[Finding]:
    """Tasks that another version of the code paused: a changed path would park them."""
    findings: list[Finding] = []
    for release in facts.releases:
        tasks = facts.tasks(release)
        others = [
            group
            for group in tasks.groups
            if group.state_format in release.formats
            and group.version != release.version
            and group.state is not TaskState.PARKED
        ]
        if not others:
            continue
        count = _count(others)
        recorded = (
            f"; recorded subtasks ({quantity(tasks.operations, 'task')} with subtasks) "
            "do not run again"
            if tasks.operations
            else ""
        )
        problem = (
            f"{quantity(count, 'task')} paused by {_versions(others)} will continue with "
            f"{release.version}{recorded}"
        )
        fix = (
            "if the code makes other calls before the last recorded one, give it a new version=, "
            "or these tasks are parked"
        )
        findings.append(
            note(
                "tasks.other_code", release.name, problem, fix,
                tasks=count, version=release.version, operations=tasks.operations,
                versions=_version_names(others),
            )
        )  # fmt: skip
    return findings


def check_parked(facts: Facts) -> list[Finding]:
    """Parked tasks, by reason, and whether this version will try them."""
    findings: list[Finding] = []
    for release in facts.releases:
        for parked in facts.tasks(release).parked:
            reason = _text(parked.reason, release)
            start = f"{quantity(parked.count, 'task')} parked: {reason}"
            tried = ", ".join(parked.tried_versions) or "an earlier release"
            version = release.code_version
            data: dict[str, JsonValue] = {
                "reason": reason,
                "tasks": parked.count,
                "tried_versions": list(parked.tried_versions),
            }
            if version in parked.tried_versions:
                problem = f"{start} (tried by {tried}); {version} does not try again"
                fix = (
                    "correct the code (if outside its module, also set another app_version), "
                    "roll back, or run: "
                    f"meshpoint tasks resume --state parked --agent {release.name} "
                    f"--config {CONFIG}"
                )
                findings.append(warning("tasks.parked", release.name, problem, fix, **data))
            else:
                problem = f"{start} (tried by {tried}); {version} tries each of them once"
                findings.append(note("tasks.retried", release.name, problem, "", **data))
    return findings


def check_suspended(facts: Facts) -> list[Finding]:
    """Tasks that a person has suspended, which no deploy continues."""
    findings: list[Finding] = []
    for release in facts.releases:
        suspended = facts.tasks(release).suspended
        if suspended is not None:
            problem = (
                f"{quantity(suspended.count, 'task')} suspended, the oldest since "
                f"{suspended.oldest.isoformat(timespec='seconds')}; no replica runs them until "
                "you resume them, but replicas of a release without `tasks suspend` continue a "
                "waiting task when its peers have answered"
            )
            fix = (
                f"to resume them, run: meshpoint tasks resume --state suspended "
                f"--agent {release.name} --config {CONFIG}"
            )
            data: dict[str, JsonValue] = {
                "tasks": suspended.count,
                "since": suspended.oldest.isoformat(),
            }
            findings.append(note("tasks.suspended", release.name, problem, fix, **data))
    return findings


def check_dead(facts: Facts) -> list[Finding]:
    """Tasks that ended because they killed their processes, by reason."""
    return [
        note(
            "tasks.dead",
            release.name,
            f"{quantity(dead.count, 'task')} dead: {_text(dead.reason, release)}",
            f"see: meshpoint tasks list --agent {release.name} --state failed --config {CONFIG}",
            tasks=dead.count,
            reason=_text(dead.reason, release),
        )
        for release in facts.releases
        for dead in facts.tasks(release).dead
    ]


def check_removed_agents(facts: Facts) -> list[Finding]:
    """Tasks of agents that neither this configuration nor a running replica serves."""
    configured = {release.name for release in facts.releases}
    findings: list[Finding] = []
    for database in facts.databases.values():
        for agent, tasks in sorted(database.tasks.items()):
            if agent in configured or not tasks.count or facts.replicas(agent):
                continue
            unknown = " as far as is known" if facts.broker is None else ""
            problem = (
                f"{quantity(tasks.count, 'task')} in {database.url} of an agent that this "
                f"configuration does not contain and no replica serves{unknown}"
            )
            fix = (
                "serve the agent until its tasks have ended, or cancel them: "
                f"meshpoint tasks list --agent {agent} --config {CONFIG}"
            )
            findings.append(warning("tasks.removed_agent", agent, problem, fix, tasks=tasks.count))
    return findings


def check_peers(facts: Facts) -> list[Finding]:
    """Tasks that wait for a peer without replicas."""
    if facts.broker is None:
        return []
    configured = {release.name for release in facts.releases}
    waits: Counter[AgentName] = Counter()
    for database in facts.databases.values():
        for tasks in database.tasks.values():
            waits.update(dict(tasks.waits))
    findings: list[Finding] = []
    for peer, count in sorted(waits.items()):
        known = facts.broker.get(peer)
        if peer in configured or known is None or known.replicas:
            continue
        what = "no replica serves it" if known.is_declared else "it never had a replica"
        problem = f"{quantity(count, 'task')} waiting for this peer: {what}"
        fix = "start it, or correct its name in the callers"
        data: dict[str, JsonValue] = {"tasks": count, "is_declared": known.is_declared}
        findings.append(warning("tasks.missing_peer", peer, problem, fix, **data))
    return findings


def check_replicas(facts: Facts) -> list[Finding]:
    """The replicas that serve each agent now, as far as the broker and the store know them."""
    findings: list[Finding] = []
    for release in facts.releases:
        count = facts.replicas(release.name)
        if count is None:
            continue
        tasks, is_known = facts.tasks(release), facts.knows_tasks(release)
        live = _live(facts.registered(release.name))
        running = f", {len(live)} registered ({_app_versions(live)})" if live else ""
        found = (
            f"{quantity(tasks.count, 'unended task')} in the database{_running(tasks)}"
            if is_known
            else "tasks in a database unknown"
        )
        findings.append(
            note(
                "replicas",
                release.name,
                f"{quantity(count, 'replica')} now{running}, {found}; "
                f"this configuration deploys {release.version}",
                replicas=count,
                tasks=tasks.count if is_known else None,
                owners=[owner.replica for owner in tasks.owners],
                version=release.version,
                registered=[_describe(each) for each in live],
            )
        )
    return findings


def check_lost_replicas(facts: Facts) -> list[Finding]:
    """Replicas that have not stopped cleanly, and live ones of other releases of Meshpoint."""
    findings: list[Finding] = []
    for release in facts.releases:
        registered = facts.registered(release.name)
        for each in registered:
            if each.state is ReplicaState.LOST:
                process = "" if each.pid is None else f" (pid {each.pid})"
                problem = (
                    f"the replica {each.id} on {each.host}{process} was last seen at "
                    f"{each.seen_at.isoformat(timespec='seconds')}: it was killed, is stopped, or "
                    "cannot reach the database; other replicas rescue its tasks"
                )
                findings.append(
                    note("replicas.lost", release.name, problem, "", **_describe(each))
                )
        others = [each for each in _live(registered) if each.release != __version__]
        if others:
            names = ", ".join(sorted({each.release for each in others}))
            problem = (
                f"{quantity(len(others), 'replica')} of Meshpoint {names}; this is {__version__}"
            )
            fix = "use features that are new in this release once all replicas have it"
            findings.append(
                note(
                    "replicas.release", release.name, problem, fix,
                    replicas=[each.id for each in others],
                )
            )  # fmt: skip
    return findings


def _live(registered: Iterable[RegisteredReplica]) -> list[RegisteredReplica]:
    return [each for each in registered if each.state is not ReplicaState.LOST]


def _app_versions(registered: Iterable[RegisteredReplica]) -> str:
    return ", ".join(sorted({each.app_version or "an unknown version" for each in registered}))


def _describe(each: RegisteredReplica) -> dict[str, JsonValue]:
    return {
        "id": each.id,
        "state": each.state.value,
        "host": each.host,
        "pid": each.pid,
        "version": each.app_version,
        "formats": list[JsonValue](sorted(set(map(plain_format, each.formats)))),
        "seen_at": each.seen_at.isoformat(),
    }


def _running(tasks: AgentTasks) -> str:
    if not tasks.owners:
        return ""
    count = sum(owner.tasks for owner in tasks.owners)
    return f", {count} of them running in {quantity(len(tasks.owners), 'replica')}"


def _count(groups: Iterable[TaskGroup]) -> int:
    return sum(group.count for group in groups)


def _states(groups: Iterable[TaskGroup]) -> dict[str, JsonValue]:
    counts: Counter[str] = Counter()
    for group in groups:
        counts[group.state.value] += group.count
    return {state: counts[state] for state in sorted(counts)}


def _versions(groups: Iterable[TaskGroup]) -> str:
    names = sorted({group.version or "an unknown version" for group in groups})
    return ", ".join(names)


def _version_names(groups: Iterable[TaskGroup]) -> list[JsonValue]:
    """The known versions that paused these tasks, "" for unknown ones."""
    return list[JsonValue](sorted({group.version or "" for group in groups}))


def _text(reason: str, release: Release) -> str:
    """A stored reason on one line, without secrets."""
    masked = mask_secrets(
        " ".join(reason.split())[: 2 * _MAX_REASON], release.settings.secret_keys
    )
    return masked if len(masked) <= _MAX_REASON else f"{masked[:_MAX_REASON]}…"
