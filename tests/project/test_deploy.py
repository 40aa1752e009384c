"""The deployment examples name flags, options, paths, metrics and stop times that exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.serving import process
from jaxinfer.serving.config import ServingConfig, load_configs
from jaxinfer.serving.health import Health
from jaxinfer.serving.http.app import build_app
from jaxinfer.serving.loop import EngineLoop
from jaxinfer.serving.metrics import Metrics
from jaxinfer.serving.service import Service
from tests.support.deploy_examples import (
    DEPLOY,
    EXAMPLES,
    IMAGES,
    arguments,
    copied_paths,
    health_command,
    manifests,
    pod,
    unit,
)
from tests.support.paths import ROOT
from tests.support.tiny_server import tiny_engine

# After the drain: the last bytes of both protocols, then the engine's thread.
END_S = process.GRACE_S + process.STOP_S


def config_of(flags: list[str]) -> ServingConfig:
    """Return the server's options as the flags set them; unknown ones are refused."""
    pairs = [flag.removeprefix("--").split("=", 1) for flag in flags]
    return load_configs(dict(pairs).get("config"), [v for name, v in pairs if name == "set"])[1]


# One process for all: importing is what takes long.
PARSE = """
import json, sys
from jaxinfer.cli import serve
for flags in json.load(sys.stdin):
    try:
        rest = serve.FLAGS(["serve", *flags])[1:]
        print(json.dumps(f"unexpected: {rest}" if rest else None))
    except Exception as error:
        print(json.dumps(str(error)))
"""


def test_command_lines_have_flags_that_the_server_accepts():
    lines = [[*example.flags] for example in EXAMPLES.values()] + [["--no_such_flag=1"]]
    done = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps(lines),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    problems = [json.loads(line) for line in done.stdout.splitlines()]
    assert problems[:-1] == [None] * len(EXAMPLES), done.stderr
    assert "no_such_flag" in problems[-1]


@pytest.mark.parametrize("name", EXAMPLES)
def test_supervisors_wait_for_the_server_to_drain(name):
    example = EXAMPLES[name]
    assert example.stop_s > config_of(example.flags).drain_s + END_S


@pytest.fixture(scope="module")
def served() -> tuple[set[str], dict[str, set[str]]]:
    """The paths of the app, and the labels of its metrics by the name of a sample."""
    engine, _ = tiny_engine()
    health = Health()
    metrics = Metrics(health)
    loop = EngineLoop(engine, observers=(metrics.observer,))
    service = Service(engine, loop, model_name="tiny")
    metrics.watch(loop, service.model.name)
    app = build_app(service, ServingConfig(), None, health, metrics)
    labels: dict[str, set[str]] = {"jaxinfer_requests_total": {"protocol", "outcome"}}
    labels["jaxinfer_requests_refused_total"] = {"protocol", "kind"}  # both empty so far
    families = list(text_string_to_metric_families(metrics.render()[0].decode()))
    assert {"jaxinfer_requests", "jaxinfer_requests_refused"} <= {f.name for f in families}
    for family in families:
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return {str(path) for path in app.openapi()["paths"]}, labels


def test_probes_use_paths_that_exist(served):
    paths, _ = served
    [container] = pod()["containers"]
    kinds = ("startupProbe", "readinessProbe", "livenessProbe")
    probed = {container[kind]["httpGet"]["path"] for kind in kinds}
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"
    assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    probed |= {e["path"] for e in manifests()["ServiceMonitor"]["spec"]["endpoints"]}
    for name in IMAGES:
        command = health_command(name)
        compile(command[2], name, "exec")
        [(port, path)] = re.findall(r"http://127\.0\.0\.1:(\d+)(/[a-z/]+)", command[2])
        assert int(port) == config_of(EXAMPLES[name].flags).http_port
        probed.add(path)
    assert probed <= paths


def test_ports_are_those_of_the_server():
    [container] = pod()["containers"]
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in container["args"])
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    assert ports == {"http": int(flags["http_port"]), "grpc": int(flags["grpc_port"])}
    service = manifests()["Service"]["spec"]
    assert {p["targetPort"] for p in service["ports"]} == set(ports)
    monitored = {e["port"] for e in manifests()["ServiceMonitor"]["spec"]["endpoints"]}
    assert monitored <= {p["name"] for p in service["ports"]}
    config = ServingConfig()
    for name in IMAGES:
        assert arguments(name, "EXPOSE") == [f"{config.http_port} {config.grpc_port}"]


def test_manifests_select_the_pods_they_create():
    deployment = manifests()["Deployment"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels
    assert manifests()["Service"]["spec"]["selector"] == labels
    monitor = manifests()["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
    assert monitor == manifests()["Service"]["metadata"]["labels"]
    mounted = {mount["name"] for mount in pod()["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod()["volumes"]}


def test_nothing_runs_as_root():
    [container] = pod()["containers"]
    user = pod()["securityContext"]["runAsUser"]
    assert pod()["securityContext"]["runAsNonRoot"] and user > 0
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    for name in IMAGES:
        assert arguments(name, "USER") == [f"{user}:{user}"]
        [cache] = arguments(name, "VOLUME")
        assert cache in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert unit()["DynamicUser"] == unit()["NoNewPrivileges"] == "yes"
    assert unit()["Restart"] == "on-failure"


@pytest.mark.parametrize("name", IMAGES)
def test_image_is_built_from_paths_and_extras_that_exist(name):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    [install] = [run for run in arguments(name, "RUN") if "pip install" in run]
    [extras] = re.findall(r'"\.\[([\w,]+)\]"', install)
    assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])
    wanted = {"cpu": set(), "cuda": {"cuda12", "triton"}, "tpu": {"tpu"}}
    assert {"serve", *wanted[name.partition(".")[2]]} <= set(extras.split(","))
    copied = set(copied_paths(name))
    assert all((ROOT / path).exists() for path in copied)
    packages = project["tool"]["setuptools"]["package-dir"].values()
    assert copied >= {*packages, "pyproject.toml", "README.md", "LICENSE"}
    [python] = {base.split()[0] for base in arguments(name, "FROM")}
    version = re.findall(r"python:([\d.]+)-slim", python)[0]
    assert f"constraints/py{version}.txt" in install
    assert (ROOT / f"constraints/py{version}.txt").is_file()


def test_dashboard_shows_metrics_that_exist(served):
    _, labels = served
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    texts = [target["expr"] for panel in panels for target in panel["targets"]]
    texts += [v["definition"] for v in dashboard["templating"]["list"] if "definition" in v]
    assert len(panels) > 15 and len({panel["id"] for panel in panels}) == len(panels)
    used_metrics = set()
    for text in texts:
        used = re.findall(r"\b((?:jaxinfer|process)_\w+)(?:\{([^}]*)\})?", text)
        assert used, text
        for metric, selector in used:
            assert metric in labels, metric
            wanted = set(re.findall(r"(\w+)\s*=~?\s*\"", selector)) - {"instance"}
            assert wanted <= labels[metric], text
            used_metrics.add(metric)
        for group in re.findall(r"\bby \(([^)]*)\)", text):
            assert set(group.split(", ")) <= set().union(*(labels[m] for m, _ in used)), text
    unshown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in labels} - {
        re.sub(r"_(bucket|sum|count)$", "", name) for name in used_metrics
    }
    kept_out = {"jaxinfer_computed_tokens_total", "jaxinfer_generated_tokens_total"}
    kept_out |= {"jaxinfer_prefix_cache_hit_tokens_total"}  # by the engine; shown by request
    assert {name for name in unshown if name.startswith("jaxinfer_")} == kept_out


def test_dashboard_panels_do_not_overlap():
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert x < 24 and taken.setdefault((x, y), panel["title"]) == panel["title"]
