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


def draw(report: Report, path: Path) -> bool:
    """Write the plot. Returns False when matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(13, 8), sharex=True, height_ratios=(1, 1), constrained_layout=True
    )
    above.fill_between(range(len(report.per_second)), report.per_second, step="post", alpha=0.6, linewidth=0)
    for each in report.timeline:
        if each["kind"] in {"broker", "database"}:
            above.axvspan(each["at"], each["until"], color=_MARKS[each["kind"]][1], alpha=0.25, linewidth=0)
    above.set_ylabel("answers per second")
    above.set_title(
        f"{report.answers:,} of {report.requests:,} requests answered through {len(report.timeline)} faults; "
        f"lost {report.lost}, duplicated {report.duplicated}, stuck {report.stuck}, wrong {report.wrong} "
        f"(seed {report.seed})"
    )
    names = list(_MARKS)
    for name, (mark, colour) in _MARKS.items():
        strikes = [each for each in report.timeline if each["kind"] == name]
        row = len(names) - names.index(name)
        below.plot([each["at"] for each in strikes], [row] * len(strikes), mark, color=colour, linestyle="none")
        below.hlines([row] * len(strikes), [s["at"] for s in strikes], [s["until"] for s in strikes], color=colour)
    below.set_yticks(range(len(names), 0, -1), names)
    below.set_xlabel("seconds; shaded: RabbitMQ (orange) or PostgreSQL (brown) unavailable")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
