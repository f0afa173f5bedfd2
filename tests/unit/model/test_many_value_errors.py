"""Values with a very large number of errors; pydantic needs a kilobyte to describe each."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
from pydantic import BaseModel

from meshpoint.errors import ConfigurationError
from meshpoint.model.declared_type import DeclaredType, TypeMismatch
from meshpoint.settings.loading import build_section

_ERROR_COUNT = 30_000


class Numbers(BaseModel):
    numbers: list[int] = []
    by_name: dict[str, int] = {}


_VALUES = {
    "a list": {"numbers": ["x"] * _ERROR_COUNT},
    "a dict": {"by_name": {str(number): "x" for number in range(_ERROR_COUNT)}},
}


def assert_refused(
    error_type: type[Exception], operation: Callable[[], object]
) -> tuple[str, BaseException | None]:
    """Check that `operation` fails with little memory. Returns the error's message and cause."""
    tracemalloc.start()
    try:
        with pytest.raises(error_type) as caught:
            operation()
        assert tracemalloc.get_traced_memory()[1] < _ERROR_COUNT * 300
    finally:
        tracemalloc.stop()
    return str(caught.value), caught.value.__cause__


@pytest.mark.parametrize("name", _VALUES)
def test_only_the_number_of_many_errors_is_reported(name: str) -> None:
    typed: DeclaredType[Numbers] = DeclaredType(Numbers, "input")
    for act in (typed.read, typed.check):
        message, cause = assert_refused(TypeMismatch, lambda act=act: act(_VALUES[name]))  # type: ignore[misc]  # the default of a lambda
        assert message == "Numbers: 30,000 errors, too many to list"
        assert cause is None  # a logged traceback would include them all


@pytest.mark.parametrize("name", _VALUES)
def test_only_the_number_of_many_configuration_errors_is_reported(name: str) -> None:
    message, cause = assert_refused(
        ConfigurationError, lambda: build_section(Numbers, _VALUES[name], {}, "mesh")
    )
    assert message == "mesh: 30,000 errors, too many to list; correct it"
    assert cause is None


def test_the_first_of_a_few_errors_is_named() -> None:
    typed: DeclaredType[Numbers] = DeclaredType(Numbers, "input")
    with pytest.raises(TypeMismatch, match=r"^Numbers: numbers\.0: .* valid integer"):
        typed.read({"numbers": ["x"] * 1000})
