"""The pages on telemetry list what the code has, and their configuration is valid."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from code_blocks import code_blocks
from meshpoint.adapters.telemetry import metrics, tracing
from meshpoint.adapters.telemetry.mesh_metrics import MESH_METRICS
from meshpoint.adapters.telemetry.metrics import METRICS, Metric
from meshpoint.model.outcomes import FailureKind
from meshpoint.model.waits import QUESTION_PREFIX, SIGNAL_PREFIX, SLEEP_PEER, wait_kind

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "reference" / "telemetry.md").read_text(encoding="utf-8")
GUIDE = (DOCS / "how-to" / "observe.md").read_text(encoding="utf-8")
TRACING = Path(tracing.__file__).read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of all tables below a heading, without header rows."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    tables = re.findall(r"^\|.*\n\|[-|]+\n((?:\|.*\n)+)", section, flags=re.MULTILINE)
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for table in tables
        for line in table.splitlines()
    ]


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize(
    ("heading", "metrics"),
    [("Metrics of a replica", METRICS), ("Metrics of a mesh", MESH_METRICS)],
)
def test_every_metric_is_documented(heading: str, metrics: Sequence[Metric]) -> None:
    assert rows(heading) == [
        [
            f"`{metric.name}`",
            metric.kind.value,
            ", ".join(f"`{label}`" for label in metric.labels),
            metric.description,
        ]
        for metric in metrics
    ]


def test_the_documented_values_of_labels_are_all() -> None:
    text = PAGE.partition("Labels are bounded")[2].partition("\n\n")[0]
    assert {kind.value for kind in FailureKind} | {"completed", "same"} <= set(code_spans(text))
    assert f"after {metrics._MAX_PEERS} names" in text
    assert f"`{metrics.OTHER_PEER}`" in text


def test_every_span_and_attribute_is_documented() -> None:
    quoted = set(re.findall(r'"((?:gen_ai|messaging|meshpoint|error|pause)\.[a-z_.]+)"', TRACING))
    internal = {tracing.PARENT, "meshpoint.segment_span", "meshpoint.open_span"}
    documented = {span for row in rows("Spans") for cell in row for span in code_spans(cell)}
    assert quoted - internal <= documented
    named = {span for span in documented if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", span)}
    assert named <= quoted


def test_every_reason_of_a_pause_is_documented() -> None:
    names = ["flights", f"{QUESTION_PREFIX}approval", f"{SIGNAL_PREFIX}chat", SLEEP_PEER]
    assert {wait_kind(name) for name in names} <= set(code_spans(PAGE))


def test_the_expressions_use_existing_metrics_and_labels() -> None:
    used = set(re.findall(r"meshpoint_\w+", GUIDE))
    assert used <= {metric.name for metric in (*METRICS, *MESH_METRICS)}


def test_the_configuration_names_the_ports_of_the_command() -> None:
    scraping, probes, mesh, _ = (yaml.safe_load(block) for block in code_blocks(GUIDE, "yaml"))
    (job,) = scraping["scrape_configs"]
    (targets,) = (each["targets"] for each in job["static_configs"])
    assert targets == [f"127.0.0.1:{9464 + number}" for number in range(3)]
    assert job.get("metrics_path", "/metrics") == "/metrics"
    (job,) = mesh["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:9470"]}]
    paths = [probe["httpGet"]["path"] for probe in probes.values()]
    assert paths == ["/healthz", "/readyz"]
