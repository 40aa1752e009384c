"""The deployment examples, parsed: the command line, ports and stop times that each holds."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from typing import Any, NamedTuple

import yaml

from tests.support.paths import ROOT

DEPLOY = ROOT / "deploy"
IMAGES = ("Dockerfile.cpu", "Dockerfile.cuda", "Dockerfile.tpu")
PROGRAM = ("/opt/jaxinfer/bin/jaxinfer", "serve")


class Example(NamedTuple):
    """One command line, and the seconds that its supervisor waits for it to end."""

    command: list[str]
    stop_s: float

    @property
    def flags(self) -> list[str]:
        """The flags of `jaxinfer serve`."""
        assert tuple(self.command[:2]) == PROGRAM
        return self.command[2:]


@cache
def instructions(name: str) -> list[tuple[str, str]]:
    """Return (instruction, arguments) of a Dockerfile; continued lines are joined."""
    lines = [line for line in (DEPLOY / name).read_text().splitlines() if line[:1] != "#"]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]  # type: ignore


def arguments(name: str, instruction: str) -> list[str]:
    """Return the arguments of every such instruction of a Dockerfile."""
    return [rest for found, rest in instructions(name) if found == instruction]


def copied_paths(name: str) -> list[str]:
    """Return the paths of the repository that a Dockerfile copies."""
    copies = [rest for rest in arguments(name, "COPY") if "--from=build" not in rest]
    return [word for rest in copies for word in rest.split()[:-1]]


def health_command(name: str) -> list[str]:
    """Return the command of a Dockerfile's health check."""
    [check] = arguments(name, "HEALTHCHECK")
    return json.loads(check[check.index("[") :])


def image_example(name: str) -> Example:
    [entrypoint] = arguments(name, "ENTRYPOINT")
    [command] = arguments(name, "CMD")
    [stop_s] = re.findall(r"--stop-timeout=(\d+)", (DEPLOY / name).read_text())
    return Example(json.loads(entrypoint) + json.loads(command), float(stop_s))


@cache
def unit() -> dict[str, str]:
    """Return the settings of the systemd unit."""
    lines = (DEPLOY / "jaxinfer.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#")


def unit_example() -> Example:
    return Example(shlex.split(unit()["ExecStart"]), float(unit()["TimeoutStopSec"]))


@cache
def manifests() -> dict[str, dict[str, Any]]:
    """Return the objects of both Kubernetes files, by kind."""
    texts = [(DEPLOY / name).read_text() for name in ("kubernetes.yaml", "servicemonitor.yaml")]
    return {m["kind"]: m for text in texts for m in yaml.safe_load_all(text)}


def pod() -> dict[str, Any]:
    """Return the pod that the Deployment describes."""
    return manifests()["Deployment"]["spec"]["template"]["spec"]


def pod_example() -> Example:
    [container] = pod()["containers"]
    [entrypoint] = arguments("Dockerfile.cpu", "ENTRYPOINT")
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    stop_s = pod()["terminationGracePeriodSeconds"] - pause
    return Example(json.loads(entrypoint) + container["args"], stop_s)


EXAMPLES = {
    **{name: image_example(name) for name in IMAGES},
    "systemd": unit_example(),
    "kubernetes": pod_example(),
}
