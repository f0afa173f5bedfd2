"""Values with a very large number of errors; pydantic needs a kilobyte to describe each."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
from pydantic import BaseModel

from meshpoint.errors import ConfigurationError
from meshpoint.model.typed import DoesNotFit, Typed
from meshpoint.settings.problems import build_section

_MANY = 30_000


class Numbers(BaseModel):
    numbers: list[int] = []
    by_name: dict[str, int] = {}


_VALUES = {
    "a list": {"numbers": ["x"] * _MANY},
    "a dict": {"by_name": {str(number): "x" for number in range(_MANY)}},
}


def refused(wrong: type[Exception], act: Callable[[], object]) -> tuple[str, BaseException | None]:
    """Check that `act` fails without using much memory. Returns the error's message and cause."""
    tracemalloc.start()
    try:
        with pytest.raises(wrong) as caught:
            act()
        assert tracemalloc.get_traced_memory()[1] < _MANY * 300
    finally:
        tracemalloc.stop()
    return str(caught.value), caught.value.__cause__


@pytest.mark.parametrize("name", _VALUES)
def test_only_their_number_is_told(name: str) -> None:
    typed: Typed[Numbers] = Typed(Numbers, "input")
    for act in (typed.read, typed.check):
        told, cause = refused(DoesNotFit, lambda act=act: act(_VALUES[name]))  # type: ignore[misc]
        assert told == "Numbers: 30,000 errors, too many to list"
        assert cause is None  # a logged traceback would include them all


@pytest.mark.parametrize("name", _VALUES)
def test_so_it_is_in_a_configuration(name: str) -> None:
    told, cause = refused(ConfigurationError, lambda: build_section(Numbers, _VALUES[name], {}, "mesh"))
    assert told == "mesh: 30,000 errors, too many to list; correct it"
    assert cause is None


def test_of_a_few_the_first_is_named() -> None:
    typed: Typed[Numbers] = Typed(Numbers, "input")
    with pytest.raises(DoesNotFit, match=r"^Numbers: numbers\.0: .* valid integer"):
        typed.read({"numbers": ["x"] * 1000})
