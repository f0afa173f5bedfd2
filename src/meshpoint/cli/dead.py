"""`meshpoint dead`: list, show, replay and drop dead letters."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshpoint.cli import sources
from meshpoint.cli.exits import ExitCode
from meshpoint.cli.output import (
    print_either,
    print_json,
    print_note,
    print_table,
    print_text,
    show_progress,
)
from meshpoint.errors import ConfigurationError, KeyMissing, MeshpointError, Unavailable
from meshpoint.model.error_text import quantity

if TYPE_CHECKING:
    from pydantic import JsonValue

    from meshpoint.cli.audit import Action
    from meshpoint.cli.letter_facts import LetterGroup
    from meshpoint.model.dead_letters import DeadLetter, LetterFilter, LetterResult
    from meshpoint.ports.dead_letters import DeadLetters
    from meshpoint.settings import MeshSettings

app = typer.Typer(
    help="List, show, replay and drop messages that no agent could handle.", no_args_is_help=True
)

_LIST = """\b
Examples:
  meshpoint dead list --config travel.yaml
  meshpoint dead list --config travel.yaml --agent travel --reason "not JSON" --letters --limit 20
  meshpoint dead list --broker postgresql://mesh@db/mesh --json
"""
_SHOW = """\b
Examples:
  meshpoint dead show travel:17 --config travel.yaml
  meshpoint dead show travel:17 --config travel.yaml --raw body.json
"""
_REPLAY = """\b
Examples:
  meshpoint dead replay travel:17 travel:18 --config travel.yaml
  meshpoint dead replay --config travel.yaml --agent travel --reason "delivery limit" --dry-run
  meshpoint dead replay travel:17 --config travel.yaml --edit body.json --yes
"""
_DROP = """\b
Examples:
  meshpoint dead drop travel:17 --config travel.yaml
  meshpoint dead drop --config travel.yaml --sender billing --yes
"""

_Agent = Annotated[
    str | None, typer.Option("--agent", metavar="NAME", help="Only letters of this agent.")
]
_Reason = Annotated[
    str,
    typer.Option("--reason", metavar="TEXT", help="Only letters whose reason contains TEXT."),
]
_Sender = Annotated[
    str | None, typer.Option("--sender", metavar="NAME", help="Only letters of this sender.")
]
_Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID...", help="Letters, instead of the options that select them."),
]
_All = Annotated[bool, typer.Option("--all", help="All letters of the mesh.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Count the letters; change nothing.")]
_Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
_EXPORT_PLACE = ("export.letter", "")
_MAX_NAMED = 100
"""Ids of letters that the audit names."""
_MAX_EDITED_BYTES = 64 * 1024 * 1024


@app.command("list", epilog=_LIST)
def list_letters(
    *,
    agent: _Agent = None,
    reason: _Reason = "",
    sender: _Sender = None,
    letters: Annotated[
        bool, typer.Option("--letters", help="List each letter instead of groups.")
    ] = False,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=1_000_000, metavar="N", help="Maximum rows.")
    ] = 100,
    config: sources.Config = None,
    broker: sources.Broker = None,
    namespace: sources.Namespace = None,
    as_json: sources.AsJson = False,
) -> None:
    """List dead letters in groups of the same agent, reason and sender, the largest first.

    Unreadable letters are groups of their own. On RabbitMQ, name the agents with --agent or in
    the file.
    """
    from meshpoint.cli import letter_facts as facts

    mesh = _Mesh(sources.require_mesh(config, broker, namespace), config)
    where = _make_filter(agent=agent, reason=reason, sender=sender)
    keys = sources.load_secret_keys(config)
    columns: Sequence[str]
    if letters:
        found = asyncio.run(_find(mesh, where, limit))
        columns, rows = facts.LETTER_COLUMNS, [facts.letter_row(each, keys) for each in found]
        data = [facts.letter_to_json(each, keys) for each in found]
    else:
        groups = asyncio.run(_group(mesh, where))[:limit]
        columns, rows = facts.GROUP_COLUMNS, [each.to_row(keys) for each in groups]
        data = [each.to_json(keys) for each in groups]
    if as_json:
        print_json(data)
    elif rows:
        print_table(columns, rows, right={"letters"})
    else:
        such = "such " if agent or reason or sender else ""
        print_text(f"no {such}dead letters in namespace {mesh.settings.namespace}")
    if len(rows) == limit:
        print_note("there may be more: raise --limit")


@app.command("show", epilog=_SHOW)
def show_letter(
    letter_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the letter.")],
    *,
    raw: Annotated[
        Path | None,
        typer.Option(
            "--raw",
            metavar="FILE",
            help="Write the body to FILE unchanged, with its secrets; - for standard output.",
        ),
    ] = None,
    unencrypted: sources.Unencrypted = False,
    config: sources.Config = None,
    broker: sources.Broker = None,
    namespace: sources.Namespace = None,
    as_json: sources.AsJson = False,
) -> None:
    """Show a dead letter: why it died, its queue, its properties and its body.

    Secrets are masked, except with --raw. With mesh.encryption_keys, FILE is encrypted, unless
    --unencrypted is given to edit it.
    """
    from meshpoint.cli import letter_facts as facts
    from meshpoint.files import write_atomically
    from meshpoint.wiring import make_mesh_sealer, seal_file

    mesh = _Mesh(sources.require_mesh(config, broker, namespace), config)
    letter, body = asyncio.run(_find_one(mesh, letter_id, is_raw=raw is not None))
    keys = sources.load_secret_keys(config)
    if raw is not None:
        if body is None:
            raise MeshpointError(f"the body of {letter_id} is too large to load, or not binary")
        if str(raw) == "-":
            sys.stdout.buffer.write(body)
            sys.stdout.flush()
            return
        with sources.exported(raw, make_mesh_sealer(mesh.settings), unencrypted) as sealer:
            write_atomically(raw, seal_file(sealer, body, _EXPORT_PLACE))
            print_note(f"wrote {quantity(len(body), 'byte')} to {raw}")
    if as_json:
        shown = facts.letter_to_json(letter, keys)
        print_json({**shown, "body": facts.show_body(body, keys)})
    else:
        print_table(("letter", letter.id), facts.describe_letter(letter, body, keys))


@app.command("replay", epilog=_REPLAY)
def replay_letters(
    ids: _Ids = None,
    *,
    agent: _Agent = None,
    reason: _Reason = "",
    sender: _Sender = None,
    all_: _All = False,
    edit: Annotated[
        Path | None,
        typer.Option("--edit", metavar="FILE", help="Replace the body of one letter by FILE."),
    ] = None,
    dry_run: _DryRun = False,
    yes: _Yes = False,
    config: sources.Config = None,
    broker: sources.Broker = None,
    namespace: sources.Namespace = None,
    as_json: sources.AsJson = False,
) -> None:
    """Send dead letters to the queues they came from, where they count as never delivered.

    Replicas and other commands may run meanwhile: no two commands replay the same letter. On
    RabbitMQ, messages get the login of this command.

    Exit code: 1 if a letter that was chosen was not replayed.
    """
    where = _select(ids, agent, reason, sender, all_=all_)
    if edit is not None and len(where.ids) != 1:
        raise typer.BadParameter("--edit needs exactly one ID")
    mesh = _Mesh(sources.require_mesh(config, broker, namespace), config)
    body = None if edit is None else _read_edited(edit, mesh.settings)

    async def replay(letters: DeadLetters, page: Sequence[DeadLetter]) -> list[LetterResult]:
        return await letters.replay(page, body)

    verbs = _Verbs("replay", "replayed", replay)
    _change(mesh, where, verbs, dry_run=dry_run, yes=yes, as_json=as_json)


@app.command("drop", epilog=_DROP)
def drop_letters(
    ids: _Ids = None,
    *,
    agent: _Agent = None,
    reason: _Reason = "",
    sender: _Sender = None,
    all_: _All = False,
    dry_run: _DryRun = False,
    yes: _Yes = False,
    config: sources.Config = None,
    broker: sources.Broker = None,
    namespace: sources.Namespace = None,
    as_json: sources.AsJson = False,
) -> None:
    """Delete dead letters. Nothing else has a copy of them.

    Exit code: 1 if a letter that was chosen was not deleted.
    """
    where = _select(ids, agent, reason, sender, all_=all_)

    async def drop(letters: DeadLetters, page: Sequence[DeadLetter]) -> list[LetterResult]:
        return await letters.drop(page)

    mesh = _Mesh(sources.require_mesh(config, broker, namespace), config)
    verbs = _Verbs("drop", "dropped", drop)
    _change(mesh, where, verbs, dry_run=dry_run, yes=yes, as_json=as_json)


def _read_edited(file: Path, mesh: MeshSettings) -> bytes:
    """Read a body. A file that `dead show --raw` has encrypted is decrypted."""
    from meshpoint.files import read_bounded
    from meshpoint.wiring import make_mesh_sealer, open_file

    sealer = make_mesh_sealer(mesh)
    try:
        return open_file(sealer, read_bounded(file, _MAX_EDITED_BYTES), _EXPORT_PLACE)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        fix = "name a file with the new body"
        raise ConfigurationError("--edit", f"{file} cannot be read: {reason}", fix) from error


@dataclass(frozen=True, slots=True)
class _Mesh:
    """The mesh, and the file that names its agents."""

    settings: MeshSettings
    config: Path | None


@dataclass(frozen=True, slots=True)
class _Verbs:
    """What a command does to a page of letters, and how it calls that."""

    infinitive: str
    past: str
    run: Callable[[DeadLetters, Sequence[DeadLetter]], Awaitable[list[LetterResult]]]


def _select(
    ids: list[str] | None, agent: str | None, reason: str, sender: str | None, *, all_: bool
) -> LetterFilter:
    """The letters that a command may change.

    Raises:
        typer.BadParameter: Nothing is selected, or in two ways.
    """
    filtered = bool(agent or reason or sender)
    if sum((bool(ids), filtered, all_)) > 1:
        raise typer.BadParameter("IDs, --all and the other options that select exclude each other")
    if not (ids or filtered or all_):
        raise typer.BadParameter("name IDs, or use --agent, --reason, --sender or --all")
    return _make_filter(ids or (), agent=agent, reason=reason, sender=sender)


def _make_filter(
    ids: Sequence[str] = (),
    *,
    agent: str | None = None,
    reason: str = "",
    sender: str | None = None,
) -> LetterFilter:
    from meshpoint.model.dead_letters import LetterFilter, agent_of
    from meshpoint.model.messages import validate_agent_name

    for each in ids:
        agent_of(each)
    name = None if agent is None else validate_agent_name(agent)
    return LetterFilter(frozenset(ids), name, reason, sender)


@asynccontextmanager
async def _open(mesh: _Mesh) -> AsyncIterator[DeadLetters]:
    from meshpoint.wiring import make_dead_letters

    letters = make_dead_letters(mesh.settings, sources.load_agent_names(mesh.config), print_note)
    if letters is None:
        raise ConfigurationError(
            "mesh.broker_url",
            "dead letters at memory:// exist only inside the process that has them",
            "name the broker of the replicas with --config FILE or --broker URL",
        )
    try:
        await letters.open()
        yield letters
    finally:
        await letters.close()


async def _pages(
    letters: DeadLetters, where: LetterFilter
) -> AsyncGenerator[Sequence[DeadLetter], None]:
    """Yield pages of letters, and show how many were read."""
    count = 0
    with show_progress("reading dead letters …") as show:
        async with aclosing(letters.read(where)) as pages:
            async for page in pages:
                yield page
                count += len(page)
                show(f"{quantity(count, 'letter')} …")


async def _find(mesh: _Mesh, where: LetterFilter, limit: int) -> list[DeadLetter]:
    found: list[DeadLetter] = []
    async with _open(mesh) as letters, aclosing(_pages(letters, where)) as pages:
        async for page in pages:
            found += page[: limit - len(found)]
            if len(found) == limit:
                break
    return found


async def _group(mesh: _Mesh, where: LetterFilter) -> list[LetterGroup]:
    from meshpoint.cli.letter_facts import LetterGroups

    groups = LetterGroups()
    async with _open(mesh) as letters, aclosing(_pages(letters, where)) as pages:
        async for page in pages:
            for letter in page:
                groups.add(letter)
    return groups.largest_first()


async def _find_one(
    mesh: _Mesh, letter_id: str, *, is_raw: bool
) -> tuple[DeadLetter, bytes | None]:
    """Return a letter and its body. A sealed body without its key says so, unless `is_raw`.

    Raises:
        KeyMissing: The body is sealed, its key is missing, and `is_raw` is set.
        MeshpointError: There is no such letter.
    """
    where = _make_filter([letter_id])
    async with _open(mesh) as letters, aclosing(_pages(letters, where)) as pages:
        async for page in pages:
            try:
                return page[0], await letters.body(page[0])
            except KeyMissing as error:
                if is_raw:
                    raise
                return page[0], json.dumps(f"({error})").encode()
    raise MeshpointError(
        f"there is no dead letter {letter_id}: it was replayed, dropped or displaced by newer ones"
    )


def _change(
    mesh: _Mesh, where: LetterFilter, verbs: _Verbs, *, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Replay or drop the selected letters, after a confirmation, and print the results."""
    from meshpoint.cli.letter_facts import results_to_json
    from meshpoint.model.dead_letters import LetterResult, describe_results

    if dry_run or not yes:
        count = asyncio.run(_count(mesh, where))
        if dry_run:
            data = {"status": "dry_run", "letters": count}
            text = f"would {verbs.infinitive} {quantity(count, 'letter')}"
            print_either(data, text, as_json=as_json)
            return
        question = f"{verbs.infinitive} {quantity(count, 'letter')}"
        if count and not typer.confirm(question, err=True):
            raise typer.Exit(ExitCode.ERROR)
    results = asyncio.run(_apply(mesh, where, verbs))
    missing = len(where.ids) - results.total()
    if missing > 0:
        results[LetterResult.GONE] += missing
    text = describe_results(results, verbs.past)
    print_either(results_to_json(results, verbs.past), text, as_json=as_json)
    if results.total() > results[LetterResult.DONE]:
        raise typer.Exit(ExitCode.ERROR)


def _action(where: LetterFilter, verbs: _Verbs) -> Action:
    """The action as the audit names it."""
    from meshpoint.cli.audit import Action

    ids = sorted(where.ids)
    target = ids[0] if len(ids) == 1 else where.agent or "all agents"
    details: dict[str, JsonValue] = {"sender": where.sender, "letters": [*ids[:_MAX_NAMED]]}
    if where.reason:
        details["reason"] = where.reason
    return Action(verbs.infinitive, target, details)


async def _count(mesh: _Mesh, where: LetterFilter) -> int:
    async with _open(mesh) as letters, aclosing(_pages(letters, where)) as pages:
        return sum([len(page) async for page in pages])


async def _apply(mesh: _Mesh, where: LetterFilter, verbs: _Verbs) -> Counter[LetterResult]:
    """Replay or drop the selected letters. After an outage, says how far it came."""
    from meshpoint.cli.audit import recorded_in_mesh
    from meshpoint.model.dead_letters import describe_results

    results: Counter[LetterResult] = Counter()
    action, namespace = _action(where, verbs), mesh.settings.namespace
    try:
        async with (
            recorded_in_mesh(
                mesh.config, namespace, action, lambda: describe_results(results, verbs.past)
            ),
            _open(mesh) as letters,
            aclosing(_pages(letters, where)) as pages,
        ):
            async for page in pages:
                results.update(await verbs.run(letters, page))
    except Unavailable:
        print_note(f"{describe_results(results, verbs.past)} before the error; run this again")
        raise
    return results
