"""Plot of a run's timeline; needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from .report import Report

_MARKS = {
    "kill": ("|", "tab:red"),
    "freeze": ("s", "tab:purple"),
    "roll": ("v", "tab:green"),
    "broker": ("D", "tab:orange"),
    "database": ("o", "tab:brown"),
    "cut broker": ("x", "tab:gray"),
    "cut database": ("+", "tab:gray"),
    "silence": ("_", "black"),
    "locked rows": ("^", "tab:blue"),
    "bad reply queues": ("1", "tab:olive"),
    "poison": ("X", "tab:green"),
    "flood": ("P", "tab:cyan"),
    "clock step": ("d", "tab:pink"),
    "swallowed cancel": ("*", "black"),
}


def draw_plot(report: Report, path: Path) -> bool:
    """Write the plot. Returns False when matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rate_axes, fault_axes) = pyplot.subplots(
        2, 1, figsize=(13, 8), sharex=True, height_ratios=(1, 1), constrained_layout=True
    )
    rate_axes.fill_between(
        range(len(report.per_second)), report.per_second, step="post", alpha=0.6, linewidth=0
    )
    for entry in report.timeline:
        if entry["kind"] in {"broker", "database"}:
            rate_axes.axvspan(
                entry["at"],
                entry["until"],
                color=_MARKS[entry["kind"]][1],
                alpha=0.25,
                linewidth=0,
            )
    rate_axes.set_ylabel("answers per second")
    rate_axes.set_title(
        f"{report.answers:,} of {report.requests:,} requests answered through "
        f"{len(report.timeline)} faults; "
        f"lost {report.lost}, duplicated {report.duplicated}, stuck {report.stuck}, wrong "
        f"{report.wrong} (seed {report.seed})"
    )
    names = list(_MARKS)
    for name, (marker, colour) in _MARKS.items():
        faults = [each for each in report.timeline if each["kind"] == name]
        row = len(names) - names.index(name)
        fault_axes.plot(
            [each["at"] for each in faults],
            [row] * len(faults),
            marker,
            color=colour,
            linestyle="none",
        )
        fault_axes.hlines(
            [row] * len(faults),
            [fault["at"] for fault in faults],
            [s["until"] for s in faults],
            color=colour,
        )
    fault_axes.set_yticks(range(len(names), 0, -1), names)
    fault_axes.set_xlabel("seconds; shaded: broker (orange) or database (brown) unavailable")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
