"""A YAML parser with limits that rejects repeated keys. The only module that imports PyYAML."""

from __future__ import annotations

from itertools import chain

import yaml

from meshpoint.errors import ConfigurationError

_MAX_VALUES = 100_000  # includes keys; a string counts once more for each 100 characters
_MAX_DIGITS = 1000
_TOO_MANY_VALUES = f"its aliases expand to more than {_MAX_VALUES} values"


def parse(text: str, file: str) -> object:
    """Parse `text`. Errors name `file`.

    Raises:
        ConfigurationError: It is not YAML, repeats a key, or exceeds a limit.
    """
    try:
        content: object = yaml.load(text, Loader=_UniqueKeyLoader)
        _check_expansion(content)
    except yaml.YAMLError as error:
        raise ConfigurationError(file, _yaml_problem(error), "correct the YAML there") from error
    except RecursionError as error:
        raise ConfigurationError(file, "is nested too deeply", "flatten it") from error
    except (
        ValueError,
        OverflowError,
        AttributeError,
        TypeError,
    ) as error:  # from an invalid date or number
        raise ConfigurationError(
            file, f"has a value that cannot be read: {error}", "put it in quotes"
        ) from error
    return content


def _check_expansion(content: object) -> None:
    """Reject YAML whose aliases multiply: a few lines can expand to gigabytes.

    Raises:
        yaml.YAMLError: `content` has too many values after expansion, or contains itself.
    """
    if _expanded_size(content, {}) > _MAX_VALUES:
        raise yaml.YAMLError(_TOO_MANY_VALUES)


def _expanded_size(value: object, sizes: dict[int, int]) -> int:
    """Return the size of `value` after expanding aliases. `sizes` caches results by identity."""
    if not isinstance(value, dict | list | tuple | set):  # a pair of `!!pairs` is a tuple
        return 1 + len(value) // 100 if isinstance(value, str | bytes) else 1
    known = sizes.get(id(value))
    if known == 0:
        raise yaml.YAMLError("an alias contains itself")
    if known is None:
        sizes[id(value)] = 0
        inner = chain(value, value.values()) if isinstance(value, dict) else value
        known = sizes[id(value)] = 1 + sum(_expanded_size(each, sizes) for each in inner)
    return known


class _UniqueKeyLoader(yaml.SafeLoader):
    """Rejects a repeated key in a mapping. Plain YAML would silently keep the last value."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._flattened: set[yaml.MappingNode] = set()
        self._value_count = 0

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Check for repeated keys before a mapping is built, or copied to where '<<' names it."""
        if node not in self._flattened:
            self._flattened.add(node)
            _reject_repeated_keys(node)
            super().flatten_mapping(node)
        self._value_count += len(node.value)
        if self._value_count > _MAX_VALUES:
            raise yaml.YAMLError(_TOO_MANY_VALUES)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Reject numbers that are too long for an error message.

        Without a limit, numbers in base 60 would also take quadratic time.
        """
        if len(node.value) > _MAX_DIGITS:
            raise ValueError(f"a number with more than {_MAX_DIGITS} digits")
        return super().construct_yaml_int(node)


_UniqueKeyLoader.add_constructor("tag:yaml.org,2002:int", _UniqueKeyLoader.construct_yaml_int)


def _reject_repeated_keys(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is repeated here", key.start_mark
                )
            seen.add(key.value)


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return str(error.args[0]) if type(error) is yaml.YAMLError else "is not YAML"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
