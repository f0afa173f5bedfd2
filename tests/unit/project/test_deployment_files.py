"""The files in config/ agree with the code: options, ports, paths, durations and metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from meshpoint.adapters.telemetry.endpoint import Endpoint
from meshpoint.adapters.telemetry.mesh_metrics import MESH_METRICS
from meshpoint.adapters.telemetry.metrics import METRICS, Kind
from meshpoint.adapters.telemetry.prometheus_meter import PrometheusMeter
from meshpoint.cli.app import app
from meshpoint.settings import load
from meshpoint.settings.loading import variable_name

CONFIG = Path(__file__).resolve().parents[3] / "config"
COMPOSE = yaml.safe_load((CONFIG / "compose.yaml").read_text())
RULES = yaml.safe_load((CONFIG / "alerts.yml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((CONFIG / "grafana/dashboards/meshpoint.json").read_text())
OBJECTS: list[dict[str, Any]] = [
    each
    for path in sorted((CONFIG / "kubernetes").glob("*.yaml"))
    for each in yaml.safe_load_all(path.read_text())
]
RUNBOOK = (CONFIG.parent / "docs/how-to/operations.md").read_text()
DEFINED = {metric.name: set(metric.labels) for metric in (*METRICS, *MESH_METRICS)}
SERIES = DEFINED | {
    f"{metric.name}_{suffix}": {*metric.labels, "le"}
    for metric in METRICS
    if metric.kind is Kind.HISTOGRAM
    for suffix in ("bucket", "sum", "count")
}
PANELS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def find(kind: str, name: str = "meshpoint-agents") -> dict[str, Any]:
    (found,) = (
        each
        for each in OBJECTS
        if (each["kind"], each.get("metadata", {}).get("name")) == (kind, name)
    )
    return found


SCALING = [each["metadata"]["query"] for each in find("ScaledObject")["spec"]["triggers"]]


def expressions() -> list[str]:
    return [*(rule["expr"] for rule in RULES), *PANELS, *SCALING]


def longest_drain() -> float:
    """Seconds after SIGTERM within which a replica of production.yaml has stopped."""
    settings = load(
        [CONFIG / "production.yaml"],
        env={"BROKER_URL": "amqp://mesh@host/", "DATABASE_URL": "postgresql://mesh@host/mesh"},
    )
    options = [agent.options() for agent in settings.agents]
    return max((each.drain_timeout + each.release_timeout).total_seconds() for each in options)


@pytest.mark.parametrize("expression", expressions())
def test_expressions_use_exported_metrics_and_labels(expression: str) -> None:
    used = re.findall(r"(meshpoint_\w+)(?:{([^}]*)})?", expression)
    assert used
    for name, matchers in used:
        labels = set(re.findall(r"(\w+)(?:=~|!~|!=|=)", matchers))
        assert labels <= SERIES[name], name
    grouped = re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
    known = set().union(*(SERIES[name] for name, _ in used))
    assert {label.strip() for labels in grouped for label in labels.split(",")} <= known


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {
        re.sub(r"_(bucket|sum|count)$", "", name) if name not in DEFINED else name
        for expression in PANELS
        for name in re.findall(r"meshpoint_\w+", expression)
    }
    assert shown == DEFINED.keys()


def test_panels_do_not_overlap() -> None:
    places = [(each["gridPos"]["x"], each["gridPos"]["y"]) for each in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({each["id"] for each in DASHBOARD["panels"]}) == len(places)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_has_a_page_and_names_labels_that_exist(rule: dict[str, Any]) -> None:
    notes = rule["annotations"]
    page, _, anchor = notes["runbook"].partition("#")
    assert page == "docs/how-to/operations.md"
    headings = re.findall(r"^## (.+)$", RUNBOOK, flags=re.MULTILINE)
    assert anchor in {re.sub(r"[^a-z]+", "-", heading.lower()) for heading in headings}
    assert f"`{rule['alert']}`" in RUNBOOK
    labels = set(re.findall(r"\$labels\.(\w+)", notes["summary"]))
    names = re.findall(r"meshpoint_\w+", rule["expr"])
    assert labels <= set().union(*(SERIES[name] for name in names))
    assert rule["labels"]["severity"] in {"warning", "critical"}


def test_the_runbook_names_no_other_alert() -> None:
    named = set(re.findall(r"`(Meshpoint[A-Z]\w+)`", RUNBOOK))
    assert named == {rule["alert"] for rule in RULES}


def commands() -> list[list[str]]:
    """The arguments of every container that runs `meshpoint`."""
    composed = [each["command"] for each in COMPOSE["services"].values() if "build" in each]
    pods = [
        each["spec"]["template"]["spec"] for each in OBJECTS if "template" in each.get("spec", {})
    ]
    return composed + [pod["containers"][0]["args"] for pod in pods]


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_every_container_runs_an_existing_command(arguments: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    words = list(arguments)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word.partition("=")[0] for word in words if word.startswith("-")} <= options
    files = [word for word in words if word.startswith("/mesh/")]
    assert files
    assert all((CONFIG / file.removeprefix("/mesh/")).exists() for file in files)


def test_no_container_is_killed_before_it_has_drained() -> None:
    spared = 5
    composed = int(COMPOSE["services"]["agents"]["stop_grace_period"].removesuffix("s"))
    pod = find("Deployment")["spec"]["template"]["spec"]
    for grace in (composed, pod["terminationGracePeriodSeconds"]):
        assert grace >= longest_drain() + spared


def test_containers_get_the_variables_of_the_configuration() -> None:
    needed = set(re.findall(r"\${(\w+)}", (CONFIG / "production.yaml").read_text()))
    environment = COMPOSE["x-agents"]["environment"]
    overrides = {variable_name("agent", "memory_url")}
    assert environment.keys() == needed | overrides
    header = (CONFIG / "kubernetes/kustomization.yaml").read_text()
    assert set(re.findall(r"--from-literal=(\w+)=", header)) == needed
    (secret,) = re.findall(r"secret generic (\S+)", header)
    for arguments in ("meshpoint-agents", "meshpoint-metrics"):
        pod = find("Deployment", arguments)["spec"]["template"]["spec"]
        assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": secret}}]


@pytest.mark.parametrize("name", ["meshpoint-agents", "meshpoint-metrics"])
def test_probes_ask_pages_that_the_endpoint_serves(name: str) -> None:
    template = find("Deployment", name)["spec"]["template"]
    (container,) = template["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    routes = {path.decode() for path in Endpoint(PrometheusMeter(), Unready())._routes}
    probes = [value for key, value in container.items() if key.endswith("Probe")]
    assert {probe["httpGet"]["port"] for probe in probes} == ports.keys()
    annotations = template["metadata"]["annotations"]
    assert {probe["httpGet"]["path"] for probe in probes} | {
        annotations["prometheus.io/path"]
    } == routes
    (port,) = ports.values()
    assert annotations["prometheus.io/port"] == str(port)
    option = "--metrics-port" if name.endswith("agents") else "--port"
    assert f"{option}={port}" in container["args"]


class Unready:
    def find_problem(self) -> str | None:
        return "unready"


def test_selectors_and_targets_name_the_deployments() -> None:
    labels = find("Deployment")["spec"]["template"]["metadata"]["labels"]
    for each in (find("Deployment"), find("PodDisruptionBudget")):
        assert each["spec"]["selector"]["matchLabels"] == labels
    assert find("ScaledObject")["spec"]["scaleTargetRef"] == {"name": "meshpoint-agents"}
    assert "replicas" not in find("Deployment")["spec"]
    assert find("Deployment", "meshpoint-metrics")["spec"]["replicas"] == 1
    (kustomization,) = (each for each in OBJECTS if each["kind"] == "Kustomization")
    files = {path.name for path in (CONFIG / "kubernetes").glob("*.yaml")}
    assert {*kustomization["resources"], "kustomization.yaml"} == files


def test_the_image_has_what_the_files_need() -> None:
    dockerfile = (CONFIG.parent / "Dockerfile").read_text()
    user = find("Deployment")["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
    assert f"\nUSER {user}\n" in dockerfile
    assert "cli,postgresql,rabbitmq,redis,telemetry" in dockerfile
    copied = re.findall(r"^COPY (.+) \S+$", dockerfile, flags=re.MULTILINE)
    for path in " ".join(copied).split():
        assert (CONFIG.parent / path).exists(), path
        assert f"!{path}\n" in (CONFIG.parent / ".dockerignore").read_text() + "\n", path


def test_prometheus_scrapes_the_services_of_compose() -> None:
    scraping = yaml.safe_load((CONFIG / "prometheus.yml").read_text())
    (job,) = scraping["scrape_configs"]
    (discovery,) = job["dns_sd_configs"]
    for service in discovery["names"]:
        command = COMPOSE["services"][service]["command"]
        option = "--metrics-port" if service == "agents" else "--port"
        assert command[command.index(option) + 1] == str(discovery["port"])
    mounted = "\n".join(COMPOSE["services"]["prometheus"]["volumes"])
    assert all(f"/{file}:" in mounted for file in scraping["rule_files"])
    (source,) = yaml.safe_load(
        (CONFIG / "grafana/provisioning/datasources/prometheus.yaml").read_text()
    )["datasources"]
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {source["uid"]}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(
        ["promtool", "check", "config", "prometheus.yml"],
        cwd=CONFIG,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
