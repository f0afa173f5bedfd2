"""Turn `--config`, `--broker`, `--db` and similar options into settings and open databases."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer

from meshpoint.errors import ConfigurationError, MeshpointError, OperationNotFound

if TYPE_CHECKING:
    from meshpoint.cli.audit import Action
    from meshpoint.model.ids import AgentName
    from meshpoint.model.tasks import TaskSummary
    from meshpoint.operations import Operations
    from meshpoint.ports.operator_store import OperatorStore
    from meshpoint.ports.sealer import Sealer
    from meshpoint.settings import MeshSettings, Settings, StoreSettings
    from meshpoint.settings.choosing import OptionNames
    from meshpoint.wiring import Tables

_D = TypeVar("_D")
_T = TypeVar("_T")
_E = TypeVar("_E", bound=StrEnum)

Config = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="YAML file of the mesh.")
]
Broker = Annotated[
    str | None, typer.Option("--broker", metavar="URL", help="Broker URL; overrides the file.")
]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", metavar="NAME", help="Namespace of the mesh; overrides the file."),
]
Database = Annotated[
    str | None, typer.Option("--db", metavar="URL", help="Database URL; overrides the file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Limit = Annotated[
    int,
    typer.Option(
        "--limit",
        min=1,
        max=1_000_000,
        metavar="N",
        help="Maximum number of results, newest first.",
    ),
]
SecretKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--secret-key", metavar="NAME", help="Another key whose values are secret; repeatable."
    ),
]

Unencrypted = Annotated[
    bool,
    typer.Option(
        "--unencrypted", help="Do not encrypt the file, although encryption_keys are set."
    ),
]

_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400}
_AGE_PATTERN = re.compile(rf"([0-9]{{1,9}}) ?({'|'.join(_SECONDS)})")
_PRIVATE_QUEUE_TTL = 300.0
"""Seconds that the queue for replies survives without its command, as in a network outage."""


def load_mesh(
    config: Path | None, broker: str | None = None, namespace: str | None = None
) -> MeshSettings:
    """Load the mesh of `config`, with `broker` and `namespace` overriding its values.

    Without `config`, the mesh comes from variables and defaults. Its private queues expire soon,
    since a command is short-lived.

    Raises:
        ConfigurationError: The settings cannot work.
    """
    from meshpoint.settings import choosing

    return _for_command(choosing.load_mesh(config, broker, namespace, _option_names()))


def _option_names() -> OptionNames:
    from meshpoint.settings.choosing import OptionNames

    fix = "use --config FILE or --broker URL"
    return OptionNames("--config", "--broker", "--namespace", fix)


def _for_command(mesh: MeshSettings) -> MeshSettings:
    return mesh.model_copy(update={"private_queue_ttl_seconds": _PRIVATE_QUEUE_TTL})


def require_mesh(config: Path | None, broker: str | None, namespace: str | None) -> MeshSettings:
    """Like `load_mesh`, for commands that send: requires a broker to be named explicitly.

    The default broker is a file in the working directory, which may never have been served.

    Raises:
        ConfigurationError: No broker is named, or the settings cannot work.
    """
    from meshpoint.settings import choosing

    return _for_command(choosing.require_mesh(config, broker, namespace, _option_names()))


def load_agent_names(config: Path | None) -> list[AgentName]:
    """Return the names of the agents in `config`. Without it, none."""
    from meshpoint.model.ids import AgentName
    from meshpoint.settings import load

    return [] if config is None else [AgentName(agent.name) for agent in load([config]).agents]


def load_databases(config: Path | None, database: str | None) -> list[StoreSettings]:
    """Return the store of each database of `config`, or the one in `database`.

    A file without agents names the database of the mesh, if it has one.

    Raises:
        ConfigurationError: Neither names a database.
    """
    from meshpoint.model.encryption_keys import to_ring
    from meshpoint.settings import StoreSettings, choosing

    if database is not None:
        keys, tenant = environment_keys()
        return [StoreSettings.at(database, key="--db", keys=to_ring(keys, tenant))]
    return choosing.stores_of(_load_named(config)) or _raise_without_database(config)


def load_schemas(config: Path | None, database: str | None) -> list[tuple[StoreSettings, Tables]]:
    """Like `load_databases`, with the tables in each, and with a database that has the queues.

    Raises:
        ConfigurationError: Neither names a database.
    """
    from meshpoint.settings import StoreSettings, choosing
    from meshpoint.wiring import Tables

    if database is not None:
        return [(StoreSettings.at(database, key="--db"), Tables.TASKS)]
    settings = _load_named(config)
    schemas = [(store, Tables.TASKS) for store in choosing.stores_of(settings)]
    if (url := settings.mesh.broker_url).startswith("postgresql"):
        schemas.append((StoreSettings.at(url, key="mesh.broker_url"), Tables.QUEUES))
    return schemas or _raise_without_database(config)


def _load_named(config: Path | None) -> Settings:
    from meshpoint.settings import load

    if config is None:
        raise ConfigurationError(
            "--config", "no database is named", "use --config FILE or --db URL"
        )
    return load([config])


def _raise_without_database(config: Path | None) -> NoReturn:
    fix = "add session_service: sql to an agent, or use --db URL"
    raise ConfigurationError(str(config), "no agent in it stores its tasks in a database", fix)


def environment_keys() -> tuple[tuple[str, ...], str | None]:
    """The encryption keys and the tenant in the environment.

    Raises:
        ConfigurationError: A key cannot be used.
    """
    from meshpoint.model import encryption_keys
    from meshpoint.settings.loading import read_overrides

    variables = read_overrides(os.environ)
    tenant = variables.get("agent", {}).get("encryption_tenant")
    return encryption_keys.environment_keys(variables), tenant


def database_options(config: Path | None, namespace: str | None) -> str:
    """The options that name the tasks of these options in a printed command.

    The database is a placeholder if `config` names none.
    """
    options = [] if namespace is None else ["--namespace", namespace]
    if config is None or not _has_database(config):
        return " ".join(["--db URL", *map(shlex.quote, options)])
    return shlex.join(["--config", str(config), *options])


def _has_database(config: Path) -> bool:
    try:
        return bool(load_databases(config, None))
    except ConfigurationError:
        return False


def load_secret_keys(config: Path | None) -> tuple[str, ...]:
    """Return the secret keys of all agents in `config`.

    Without `config`, only the keys of the environment count.

    Raises:
        ConfigurationError: The settings cannot work.
    """
    from meshpoint.settings import load

    if config is None:
        return tuple(environment_secret_keys())
    return tuple({key: None for agent in load([config]).agents for key in agent.secret_keys})


def environment_secret_keys() -> list[str]:
    """Return the secret keys that the environment configures for agents.

    Raises:
        ConfigurationError: The variable is not a JSON list.
    """
    from meshpoint.settings.loading import read_overrides, variable_name

    keys = read_overrides(os.environ).get("agent", {}).get("secret_keys", "[]")
    try:
        return [str(key) for key in json.loads(keys)]
    except (ValueError, TypeError, RecursionError) as error:
        name = variable_name("agent", "secret_keys")
        raise ConfigurationError(
            name, "is not a JSON list", f"""write {name}='["name"]'"""
        ) from error


def environment_sealer() -> Sealer | None:
    """The sealer with the keys in the environment.

    Raises:
        ConfigurationError: A key cannot be used.
    """
    from meshpoint import wiring

    return wiring.environment_sealer()


def database_sealer(config: Path | None, database: str | None) -> Sealer | None:
    """The sealer with the keys of all databases of these options.

    Raises:
        ConfigurationError: Neither names a database, or a key cannot be used.
    """
    from meshpoint import wiring

    keys = {key: None for store in load_databases(config, database) for key in store.keys}
    return wiring.make_sealer(tuple(keys), "encryption_keys")


@contextmanager
def exported(path: Path, sealer: Sealer | None, unencrypted: bool) -> Iterator[Sealer | None]:
    """Yield the sealer for an exported file or folder. Then say whether it is encrypted.

    Says nothing without keys.
    """
    from meshpoint.cli.output import print_note

    yield None if unencrypted else sealer
    if sealer is None:
        return
    if unencrypted or sealer.key_id() is None:
        print_note(f"{path} is not encrypted: keep it as safe as the keys")
    else:
        print_note(f"{path} is encrypted")


async def open_each(
    config: Path | None,
    database: str | None,
    namespace: str | None,
    open_database: Callable[[StoreSettings, str], AbstractAsyncContextManager[_D]],
) -> AsyncGenerator[_D, None]:
    """Yield each database in turn, open during its iteration."""
    mesh = load_mesh(config, namespace=namespace)
    for each in load_databases(config, database):
        check_file_exists(each.url)
        async with open_database(each, mesh.namespace) as opened:
            yield opened


def open_operations(store: StoreSettings, namespace: str) -> Operations:
    """Create the operations of a database; for `open_each`."""
    from meshpoint.operations import Operations

    return Operations.at(store, namespace)


async def query_operation(
    config: Path | None,
    database: str | None,
    namespace: str | None,
    query: Callable[[Operations], Awaitable[_T]],
) -> _T:
    """Return the result from the first database that has the operation.

    Raises:
        OperationNotFound: No database has it.
    """
    failure = OperationNotFound("", "there is no database")
    async with aclosing(open_each(config, database, namespace, open_operations)) as databases:
        async for operations in databases:
            try:
                return await query(operations)
            except OperationNotFound as error:
                failure = error
    raise failure


async def change_all(
    config: Path | None,
    database: str | None,
    namespace: str | None,
    find: Callable[[Operations], AsyncGenerator[list[TaskSummary], None]],
    change: Callable[[Operations, Sequence[str]], Awaitable[list[str]]] | None,
    action: Action,
) -> list[TaskSummary]:
    """Change the tasks that `find` yields, and return the changed tasks; all without `change`.

    `change` gets the ids of a batch, and returns the ids of the changed tasks. Each database with
    such tasks records the `action` in its audit.
    """
    chosen: list[TaskSummary] = []
    async with aclosing(open_each(config, database, namespace, _open_audited)) as databases:
        async for store in databases:
            chosen += await _change_in(store, find, change, action)
    return chosen


async def _change_in(
    store: OperatorStore,
    find: Callable[[Operations], AsyncGenerator[list[TaskSummary], None]],
    change: Callable[[Operations, Sequence[str]], Awaitable[list[str]]] | None,
    action: Action,
) -> list[TaskSummary]:
    """As `change_all`, in one database."""
    from meshpoint.cli.audit import recorded
    from meshpoint.operations import Operations

    operations = Operations._on(store)
    chosen: list[TaskSummary] = []
    async with (
        recorded(
            store, None if change is None else action, lambda: action.describe(len(chosen))
        ) as record,
        aclosing(find(operations)) as pages,
    ):
        async for tasks in pages:
            await record.begin()
            ids = [task.task_id for task in tasks]
            changed = set(ids if change is None else await change(operations, ids))
            chosen += [task for task in tasks if task.task_id in changed]
    return chosen


@asynccontextmanager
async def _open_audited(store: StoreSettings, namespace: str) -> AsyncIterator[OperatorStore]:
    """Open a database with its audit; for `open_each`."""
    from meshpoint.wiring import make_operator_store

    opened = make_operator_store(store, namespace)
    try:
        await opened.open()
        yield opened
    finally:
        await opened.close()


def add_working_directory() -> None:
    """Let entrypoints name modules in the working directory."""
    cwd = str(Path.cwd())
    if cwd not in sys.path:
        sys.path.insert(0, cwd)


def parse_choices(option: str, names: list[str] | None, choices: type[_E]) -> list[_E]:
    """Return the members of an enum with these values.

    Raises:
        ConfigurationError: A value is invalid; the message names `option`.
    """
    try:
        return [choices(name) for name in names or ()]
    except ValueError as error:
        fix = f"use one of {', '.join(choices)}"
        raise ConfigurationError(option, str(error), fix) from error


def parse_instant(option: str, text: str | None) -> datetime | None:
    """Return the time that `text` names: an age such as "2h", or an ISO 8601 time with its zone.

    Raises:
        ConfigurationError: It is neither; the message names `option`.
    """
    if text is None:
        return None
    fix = "use an age such as 90s, 15min, 2h or 7d, or a time such as 2026-01-31T12:00+01:00"
    try:
        if match := _AGE_PATTERN.fullmatch(text.strip()):
            return datetime.now(UTC) - timedelta(seconds=int(match[1]) * _SECONDS[match[2]])
        instant = datetime.fromisoformat(text.strip())
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(option, f"{text!r} is not a time", fix) from error
    if instant.tzinfo is None:
        raise ConfigurationError(option, f"{text!r} has no time zone", fix)
    return instant


def check_file_exists(url: str) -> None:
    """Check that a SQLite file exists, since opening a store would create it.

    Raises:
        MeshpointError: `url` names a SQLite file that does not exist or cannot be reached.
    """
    scheme, _, file = url.partition(":///")
    try:
        missing = scheme.startswith("sqlite") and not Path(file.partition("?")[0]).exists()
    except OSError as error:
        raise MeshpointError(f"{file} cannot be opened: {error.strerror}") from error
    if missing:
        raise MeshpointError(f"the file {file} does not exist: no replica has used it yet")
