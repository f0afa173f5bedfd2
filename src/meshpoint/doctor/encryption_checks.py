"""Findings about the keys that encrypt what is stored."""

from __future__ import annotations

from meshpoint import wiring
from meshpoint.doctor.facts import Facts, Release
from meshpoint.doctor.findings import CONFIG, Finding, error, note, warning
from meshpoint.model.error_text import quantity


def check_encryption(facts: Facts) -> list[Finding]:
    """Keys in use, keys that are missing, and keys that running replicas may not have yet."""
    findings = [each for release in facts.releases for each in _check_agent(facts, release)]
    mesh = wiring.make_mesh_sealer(facts.settings.mesh)
    if mesh is not None:
        problem = f"mesh.encryption_keys {_describe(mesh.key_id(), mesh.key_ids)}"
        findings.append(note("keys.mesh", facts.settings.mesh.namespace, problem))
    return findings


def _check_agent(facts: Facts, release: Release) -> list[Finding]:
    sealer = wiring.make_sealer(release.settings.key_ring, "encryption_keys")
    known = () if sealer is None else sealer.key_ids
    used, findings = facts.tasks(release).key_ids, list[Finding]()
    for key_id in used:
        if key_id not in known:
            problem = f"values are sealed with key {key_id}, which encryption_keys does not have"
            fix = "add the key: without it, replicas do not start"
            findings.append(error("keys.missing", release.name, problem, fix, key=key_id))
    if sealer is None:
        return findings
    newest = sealer.key_id(release.name)
    if newest is not None and newest not in used and (running := facts.replicas(release.name)):
        problem = (
            f"key {newest} is new: those of {quantity(running, 'running replica')} that lack it, "
            "or have an earlier release, cannot read what it seals"
        )
        fix = "first deploy it as the last key of the list, or after `clear`, to all replicas"
        findings.append(warning("keys.new", release.name, problem, fix, key=newest))
    stale = [key_id for key_id in used if key_id != newest and key_id in known]
    problem = f"encryption_keys {_describe(newest, known)}"
    fix = f"to remove {', '.join(stale)}, run: meshpoint db reseal {CONFIG}" if stale else ""
    findings.append(note("keys.used", release.name, problem, fix, keys=list(known)))
    return findings


def _describe(newest: str | None, known: tuple[str, ...]) -> str:
    others = [key_id for key_id in known if key_id != newest]
    reads = f"opens {', '.join(others)}" if others else ""
    if newest is None:
        return f"seals nothing, and {reads}"
    return f"seals with {newest}" + (f", and also {reads}" if reads else "")
