"""The wheel, installed outside the clone, generates, serves and plans, as the recipes run it."""

from __future__ import annotations

import json
import urllib.request
import zipfile
from pathlib import Path

import grpc
import pytest

from jaxinfer.serving.protos.jaxinfer.v1 import inference_pb2 as pb
from jaxinfer.serving.protos.jaxinfer.v1.inference_pb2_grpc import InferenceStub
from tests.support.deploy_examples import EXAMPLES, IMAGES, PROGRAM, health_command
from tests.support.installed_wheel import Installed, build_wheel, python_with_dependencies
from tests.support.paths import ROOT
from tests.support.tiny_checkpoints import TinyLlama, write_checkpoint

pytestmark = [pytest.mark.long, pytest.mark.ci]

# The folders of the repository, and where a wheel has them.
PACKAGES = {"jaxinfer": "jaxinfer"} | {
    name: f"jaxinfer/{name}" for name in ("configs", "kernels", "serving", "sharding")
}
SHIPPED = {".py", ".pyi", ".toml", ".json", ".html", ".proto"}
KEY = "a-key-of-the-test"
# A tiny model in place of the recipe's, compiled when it is first used, on any free ports.
OVERRIDES = ["--set=warm_up=false", "--set=bucket_growth=64", "--set=cache.num_pages=16"]
OVERRIDES += ["--set=scheduler.max_num_batched_tokens=64", "--set=scheduler.max_num_seqs=4"]
PORTS = ["--http_port=0", "--grpc_port=0"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module", params=["3.11", "3.12"])
def installed(request, wheel, tmp_path_factory) -> Installed:
    python = python_with_dependencies(request.param)
    return Installed(tmp_path_factory.mktemp("installed"), wheel, python)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    tiny = TinyLlama(num_layers=1, max_positions=4096, seed=1)
    return str(write_checkpoint(tiny, tmp_path_factory.mktemp("model") / "tiny"))


def test_wheel_holds_every_file_of_the_packages_and_no_other(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = {
        f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, place in PACKAGES.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHIPPED and "__pycache__" not in path.parts
    }
    assert names == wanted


def test_installed_package_is_not_the_clone(installed):
    modules = "jaxinfer, jaxinfer.kernels, jaxinfer.serving, jaxinfer.sharding, jaxinfer.configs"
    code = f"import {modules}\nfor m in ({modules}): print(m.__file__)"
    files = [Path(line) for line in installed.run("python", "-c", code).stdout.splitlines()]
    assert len(files) == 5 and all(file.is_relative_to(installed.root) for file in files)
    assert installed.run("jaxinfer", "--version").stdout.startswith("jaxinfer ")


def test_installed_command_generates(installed, model):
    flags = [f"--model={model}", "--config=demo", "--temperature=0", "--max_tokens=4"]
    prompt = ["--prompt=Hello", "--format=jsonl", "--ignore_eos"]
    done = installed.run("jaxinfer", "generate", *flags, *prompt, *OVERRIDES)
    [answer] = map(json.loads, done.stdout.splitlines())
    assert answer["prompt"] == "Hello" and len(answer["token_ids"]) == 4
    assert answer["finish_reason"] == "length"


def test_installed_command_plans(installed, model):
    sizes = ["--mesh=tensor=2", "--context=64", "--rows=2", "--chunk=2"]
    plan = installed.run("jaxinfer", "plan", f"--model={model}", "--target=cpu:2", *sizes)
    assert "decode step: 2 rows" in plan.stdout


# One of the recipes with the same flags stands for all of them.
COMMANDS = {tuple(example.command): name for name, example in EXAMPLES.items()}


@pytest.mark.parametrize("name", COMMANDS.values())
def test_command_of_the_recipe_serves_over_http_and_grpc(installed, model, name):
    keys = installed.home / "api_keys"
    keys.write_text(f"{KEY}\n")
    command = [
        f"--api_keys_file={keys}" if flag.startswith("--api_keys_file=") else flag
        for flag in EXAMPLES[name].command
    ]
    assert (command[0], *command[1:2]) == PROGRAM
    command[0] = str(installed.bin / "jaxinfer")
    with installed.serve([*command, f"--model={model}", *PORTS, *OVERRIDES]) as addresses:
        port = addresses["http"].rpartition(":")[2]
        target = f"127.0.0.1:{addresses['grpc'].rpartition(':')[2]}"
        if name in IMAGES:
            _, *check = health_command(name)
            installed.run("python", *(part.replace(":8000/", f":{port}/") for part in check))
        body = {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json", "authorization": f"Bearer {KEY}"},
        )
        with urllib.request.urlopen(request, timeout=100) as reply:
            assert json.load(reply)["usage"]["completion_tokens"] == 4
        with grpc.insecure_channel(target) as channel:
            answer = InferenceStub(channel).Complete(
                pb.GenerateRequest(
                    text="Hello", params=pb.SamplingParams(max_tokens=4, ignore_eos=True)
                ),
                metadata=(("authorization", f"Bearer {KEY}"),),
                timeout=100,
            )
        assert answer.finished.usage.output_tokens == 4
