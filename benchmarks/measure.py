"""Interleaved rounds, so that drift of the machine affects all contenders equally."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one contender: units of work, seconds, and other measurements."""

    count: float
    seconds: float
    extras: Mapping[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Units of work per second."""
        return self.count / self.seconds


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, minimum and maximum of the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Spread:
        """The spread of `values`."""
        return cls(median(values), min(values), max(values))

    def __format__(self, spec: str) -> str:
        """`0.82 (0.80..0.85)` for the spec `.2f`."""
        return f"{self.median:{spec}} ({self.low:{spec}}..{self.high:{spec}})"


@dataclass(frozen=True, slots=True)
class Medians:
    """All samples of a measurement by contender, in order of the rounds."""

    samples: Mapping[str, Sequence[Sample]]

    def __add__(self, more: Medians) -> Medians:
        """These samples and later ones of the same contenders."""
        names = more.samples
        return Medians({name: [*self.samples.get(name, ()), *names[name]] for name in names})

    def rate(self, name: str) -> Spread:
        """Units of work per second."""
        return Spread.from_values([sample.rate for sample in self.samples[name]])

    def extra(self, name: str, key: str) -> Spread:
        """The spread of one additional measurement."""
        return Spread.from_values([sample.extras[key] for sample in self.samples[name]])

    def ratio(self, name: str, reference: str) -> Spread:
        """The speed of `name` relative to `reference`, compared round by round."""
        pairs = zip(self.samples[name], self.samples[reference], strict=True)
        return Spread.from_values(
            [rate.rate / reference_rate.rate for rate, reference_rate in pairs]
        )


async def interleaved(
    contenders: Mapping[str, Callable[[], Awaitable[Sample]]],
    rounds: int,
    *,
    title: str = "rounds",
) -> Medians:
    """Run all contenders round after round, in reverse order every other round.

    Warm up the contenders before calling this.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    with make_progress() as progress:
        task = progress.add_task(title, total=rounds * len(contenders))
        for number in range(rounds):
            for name in list(contenders)[:: 1 if number % 2 == 0 else -1]:
                progress.update(task, description=f"{title}: {name}")
                samples[name].append(await contenders[name]())
                progress.advance(task)
    return Medians(samples)


def make_progress() -> Progress:
    """A progress bar on standard error, if that is a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not sys.stderr.isatty(),
    )
