"""Return values of subtasks, converted to text and back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NewType, NotRequired, Required

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import (
    BaseModel,
    Field,
    JsonValue,
    RootModel,
    SecretStr,
    computed_field,
    field_serializer,
)
from typing_extensions import TypedDict

from json_strategies import json_values
from meshpoint.errors import SubtaskRefused
from meshpoint.model.declared_type import TypeMismatch
from meshpoint.model.secrets import Secret
from meshpoint.subtasks import secret_places
from meshpoint.subtasks.deliverable import DeliverableCodec

if TYPE_CHECKING:
    from somewhere import Unknown  # type: ignore[import-not-found]  # there is no such module


class Ratios(BaseModel, extra="forbid", frozen=True):
    current: Decimal
    at: datetime
    notes: tuple[str, ...] = ()
    industry: str = Field(default="", alias="sector")

    @computed_field  # type: ignore[prop-decorator]  # mypy has no support for it
    @property
    def healthy(self) -> bool:
        return self.current > 1


@dataclass
class Statement:
    rows: dict[str, float]
    tags: set[str] = field(default_factory=set)


RATIOS = Ratios(
    current=Decimal("1.50"), at=datetime(2024, 5, 1, tzinfo=UTC), notes=("a",), sector="steel"
)


def annotated_step(annotation: Any) -> DeliverableCodec:
    def step() -> None: ...

    step.__annotations__["return"] = annotation
    return DeliverableCodec(step)


def round_trip(annotation: Any, value: object) -> Any:
    form = annotated_step(annotation)
    return form.read(form.write("x", value)[0])


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Ratios, RATIOS),
        ("Ratios", RATIOS),
        (list[Ratios], [RATIOS, RATIOS]),
        (dict[int, Ratios] | None, {1: RATIOS}),
        (Ratios | None, None),
        (None, None),
        (Statement, Statement({"b": 1.0, "a": 0.1}, {"x", "y"})),
        (tuple[int, str], (1, "a")),
        (set[str], {"a", "b"}),
        (datetime, datetime(2024, 5, 1, 12, 30, tzinfo=UTC)),
        (Awaitable[Ratios], RATIOS),
        (Coroutine[Any, Any, tuple[int, int]], (1, 2)),
        (int, 2**200),
        (str, "zero \0, line separator \u2028, wide 😀"),
    ],
)
def test_a_value_is_restored_as_annotated(annotation: Any, value: object) -> None:
    restored = round_trip(annotation, value)
    assert restored == value
    assert type(restored) is type(value)


def test_the_text_is_exact() -> None:
    def step() -> dict[str, object]:
        raise NotImplementedError

    text, secrets = DeliverableCodec.for_function(step).write(
        "x", {"b": "ä", "a": [1e16, 0.1, 10**20, "\0"]}
    )
    assert text == '{"b":"ä","a":[1e+16,0.1,100000000000000000000,"\\u0000"]}'
    assert secrets == ()


@given(json_values)
def test_plain_json_is_restored_unchanged(value: JsonValue) -> None:
    restored = round_trip(Any, value)
    assert json.dumps(restored) == json.dumps(value)


@given(
    st.builds(
        Statement,
        rows=st.dictionaries(
            st.text(max_size=3), st.floats(allow_nan=False, allow_infinity=False)
        ),
        tags=st.sets(st.text(max_size=3)),
    )
)
def test_an_annotated_dataclass_is_restored_equal(value: Statement) -> None:
    assert round_trip(Statement, value) == value


def test_an_unannotated_value_is_restored_as_plain_json() -> None:
    def step():  # type: ignore[no-untyped-def]  # what is tested
        ...

    form = DeliverableCodec.for_function(step)
    assert form.read(form.write("x", ((1, 2), {"at": RATIOS.at}))[0]) == [
        [1, 2],
        {"at": "2024-05-01T00:00:00Z"},
    ]
    assert form.read(form.write("x", Statement({"a": 1.0}))[0]) == {"rows": {"a": 1.0}, "tags": []}


def test_an_unusable_annotation_is_ignored() -> None:
    def unresolvable() -> Unknown: ...

    class Table:
        """A type that pydantic cannot handle."""

    def unknown() -> Table: ...  # type: ignore[empty-body]  # never called

    assert round_trip("Nowhere", (1,)) == [1]
    assert DeliverableCodec.for_function(unresolvable).read('{"a":1}') == {"a": 1}
    assert round_trip(Table, {"a": 1}) == {"a": 1}
    assert DeliverableCodec.for_function(unknown).read("[1]") == [1]


def test_an_unresolvable_parameter_annotation_is_ignored() -> None:
    def step(filing: Unknown) -> Ratios: ...  # type: ignore[empty-body]  # never called

    assert (
        DeliverableCodec.for_function(step).read(
            DeliverableCodec.for_function(step).write("x", RATIOS)[0]
        )
        == RATIOS
    )


def test_partials_methods_and_callables_use_their_functions_annotation() -> None:
    class Parser:
        def parse(self) -> Ratios:
            return RATIOS

        async def __call__(self) -> Ratios:
            return RATIOS

    for function in (Parser().parse, partial(Parser().parse), Parser(), Ratios):
        form = DeliverableCodec.for_function(function)
        assert form.read(form.write("x", RATIOS)[0]) == RATIOS
    assert DeliverableCodec.for_function(Parser().parse) is DeliverableCodec.for_function(
        Parser().parse
    )


def nested_list(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def endless_list() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def generate_values() -> Iterator[int]:
    yield 1


async def stream_values() -> AsyncIterator[int]:
    yield 1


REFUSED_VALUES: list[tuple[Any, Callable[[], object], str]] = [
    (
        Ratios,
        lambda: {"current": "x"},
        "a dict that cannot be recorded: Ratios: current: Input should be",
    ),
    (int, lambda: "many", "a str that cannot be recorded: int: Input should be a valid integer"),
    (None, lambda: 1, "a int that cannot be recorded"),
    (Any, object, "a object that cannot be recorded"),
    (
        Any,
        lambda: {"rows": [1.0, float("nan")]},
        r"a dict that cannot be recorded: value: value.rows\[1\]: nan is not JSON",
    ),
    (Statement, lambda: Statement({"a": float("inf")}), r"Statement.rows.a: inf is not JSON"),
    (float, lambda: float("nan"), "nan is not JSON"),
    (Any, lambda: {"a": "\ud800"}, "that cannot be recorded"),
    (Any, lambda: nested_list(101), "nested more than 100 deep"),
    (Any, lambda: nested_list(5000), "that cannot be recorded"),
    (Any, endless_list, "that cannot be recorded"),
    (
        Any,
        generate_values,
        "a generator that cannot be recorded: it can be iterated only once; return a list",
    ),
    (
        Iterator[int],
        generate_values,
        "a generator that cannot be recorded: it can be iterated only once",
    ),
    (Any, stream_values, "can be iterated only once"),
    (int, lambda: 10**5000, "that cannot be recorded"),
]


@pytest.mark.parametrize(("annotation", "value", "problem"), REFUSED_VALUES)
def test_a_value_that_cannot_be_stored_is_refused_with_its_path(
    annotation: Any, value: Callable[[], object], problem: str
) -> None:
    with pytest.raises(SubtaskRefused, match=f"subtask 'ratios' returned .*{problem}"):
        annotated_step(annotation).write("ratios", value())


def test_a_value_that_cannot_be_restored_is_refused() -> None:
    class OneWay(BaseModel):
        rate: int

        @field_serializer("rate")
        def percent(self, rate: int) -> str:
            return f"{rate} %"

    with pytest.raises(SubtaskRefused, match="OneWay: rate: Input should be a valid integer"):
        annotated_step(OneWay).write("x", OneWay(rate=1))


def test_a_text_of_another_annotation_does_not_fit() -> None:
    with pytest.raises(TypeMismatch, match="int: "):
        annotated_step(int).read('"many"')


SecretText = Annotated[str, Secret]
Named = NewType("Named", SecretText)


class Login(BaseModel):
    user: str
    password: SecretText = Field(alias="pass/word")
    others: list[Annotated[str, Secret()]] = []
    by_host: dict[str, SecretText | None] = {}


@dataclass(frozen=True)
class Session:
    token: SecretText
    login: Login | None = None


class Headers(TypedDict):
    name: str
    authorization: NotRequired[SecretText]
    cookie: Required[SecretText]


class Pair(NamedTuple):
    name: str
    value: SecretText


class Logins(RootModel[list[Login]]):
    pass


LOGIN = Login.model_validate(
    {"user": "u", "pass/word": "p", "others": ["q"], "by_host": {"a~b": "r", "none": None}}
)
IN_LOGIN = ("/pass~1word", "/others/0", "/by_host/a~0b")


@pytest.mark.parametrize(
    ("annotation", "value", "places"),
    [
        (SecretText, "s", ("",)),
        (SecretText | None, "s", ("",)),
        (SecretText | None, None, ()),
        (Named, "s", ("",)),
        (list[SecretText], ["a", "b"], ("/0", "/1")),
        (tuple[str, SecretText], ("a", "b"), ("/1",)),
        (tuple[SecretText, ...], ("a", "b"), ("/0", "/1")),
        (set[SecretText], {"a", "b"}, ("",)),
        (dict[str, list[SecretText]], {"a/b": ["c"]}, ("/a~1b/0",)),
        (dict[SecretText, int], {"a": 1}, ("",)),
        (Login, LOGIN, IN_LOGIN),
        (Login | None, LOGIN, IN_LOGIN),
        (Logins, Logins([LOGIN]), tuple(f"/0{place}" for place in IN_LOGIN)),
        (Session, Session("t", LOGIN), ("/token", *(f"/login{place}" for place in IN_LOGIN))),
        (list[Session | int], [1, Session("t")], ("/1/token",)),
        (frozenset[Pair], frozenset([Pair("a", "b")]), ("",)),
        (
            Headers,
            {"name": "n", "authorization": "a", "cookie": "c"},
            ("/authorization", "/cookie"),
        ),
        (Headers, {"name": "n", "cookie": "c"}, ("/cookie",)),
        (Pair, Pair("a", "b"), ("/1",)),
        (Any, [LOGIN], tuple(f"/0{place}" for place in IN_LOGIN)),
        (Any, {"a": Session("t")}, ("/a/token",)),
        (Annotated[Login, Field(description="whole")], LOGIN, IN_LOGIN),
        (Annotated[Login, Secret], LOGIN, ("",)),
        (str, "s", ()),
    ],
)
def test_the_paths_of_secrets_are_found(
    annotation: Any, value: object, places: tuple[str, ...]
) -> None:
    form = annotated_step(annotation)
    text, found = form.write("x", value)
    assert found == places
    assert "***" not in text


def test_a_secret_at_an_unknown_path_masks_its_container() -> None:
    class Reshaped(BaseModel):
        token: SecretText

        @field_serializer("token")
        def wrapped(self, token: str) -> str:
            return token

    class Packed(RootModel[Reshaped]):
        @field_serializer("root")
        def packed(self, root: Reshaped) -> dict[str, str]:
            return {"token": root.token}

    class Renamed(BaseModel):
        session: Session

        @field_serializer("session")
        def flat(self, session: Session) -> str:
            return f"session {session.token}"

    assert annotated_step(Reshaped).write("x", Reshaped(token="t"))[1] == ("/token",)
    assert annotated_step(Packed).write("x", Packed(Reshaped(token="t")))[1] == ("/token",)
    form = annotated_step(Any)
    assert form.write("x", [Renamed(session=Session("t"))])[1] == ("/0/session",)


@pytest.mark.parametrize(
    "annotation", [Any, SecretStr, list[SecretStr], "unresolvable", dict[str, Any]]
)
def test_secrets_that_serialize_as_asterisks_are_refused(annotation: Any) -> None:
    value: object = SecretStr("s")
    if annotation == list[SecretStr]:
        value = [value]
    if annotation == dict[str, Any]:
        value = {"key": value}
    with pytest.raises(
        SubtaskRefused,
        match=r"is a SecretStr, whose JSON is only stars; use Annotated\[str, Secret\]",
    ):
        annotated_step(annotation).write("x", value)


def test_a_secret_serialized_by_its_model_is_a_secret_path() -> None:
    class Key(BaseModel):
        key: SecretStr

        @field_serializer("key", when_used="json")
        def shown(self, key: SecretStr) -> str:
            return key.get_secret_value()

    form = annotated_step(Key)
    text, tiers = form.write("x", Key(key=SecretStr("k")))
    assert tiers == ("/key",)
    assert form.read(text).key.get_secret_value() == "k"


@pytest.mark.parametrize("innermost", ["text", Session("t")])
def test_json_is_walked_in_search_of_secrets_at_most_once(
    monkeypatch: pytest.MonkeyPatch, innermost: Any
) -> None:
    nested: Any = innermost
    for _ in range(5):
        nested = {"parts": [nested, "text"]}
    walked: list[object] = []
    original = secret_places._walk

    def walk(declared: Any, value: Any, written: JsonValue, at: str) -> Iterator[str]:
        walked.append(value)
        return original(declared, value, written, at)

    monkeypatch.setattr(secret_places, "_walk", walk)
    pointers = annotated_step(Any).write("x", nested)[1]
    if innermost == "text":
        assert (pointers, walked) == ((), [])
    else:
        assert pointers == ("/parts/0" * 5 + "/token",)
        assert len(walked) == 5 + 5 + 1 + 2  # objects, lists, the session and its fields


def test_an_object_in_the_place_of_plain_json_may_have_secrets() -> None:
    @dataclass
    class Holder:
        plain: JsonValue

    holder = Holder(Session("t"))  # type: ignore[arg-type]  # dataclasses check no types
    assert annotated_step(Any).write("x", holder)[1] == ("/plain/token",)
