"""The OpenAPI document describes the server: schemathesis tests it with all checks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from jaxinfer.serving.auth import ApiKeys
from tests.support.http_harness import http_harness, run
from tests.support.paths import ROOT
from tests.support.tiny_server import tiny_engine

KEY = "sk-schema-1"
CONFIG = f"""
hooks = "tests.support.schemathesis_hooks"
request-timeout = 60
suppress-health-check = ["filter_too_much"]
[generation]
max-examples = 12
deterministic = true
database = "none"
[checks]
max_response_time = 60
[auth.openapi.key]
bearer = "{KEY}"
"""


@pytest.mark.ci
@pytest.mark.once
def test_server_conforms_to_its_openapi_document(tmp_path):
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "schemathesis.cli", f"--config-file={config}", "run"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def schemathesis(url: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, f"{url}/openapi.json", "--checks=all", "--no-color"],
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
            timeout=150,
        )

    async def main():
        engine = tiny_engine({"max_model_len": 256})[0]
        async with http_harness(engine, keys=ApiKeys([("schema", KEY)])) as harness:
            harness.client.headers["Authorization"] = f"Bearer {KEY}"
            await harness.complete("compiled before anybody counts the seconds", max_tokens=3)
            done = await asyncio.to_thread(schemathesis, harness.url)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "Operations:       10 selected / 10 total" in done.stdout
            assert "Tested: 10" in done.stdout
            await harness.idle()

    run(main(), timeout_s=180)


def test_document_requires_keys_if_configured():
    async def main():
        engine = tiny_engine()[0]
        async with http_harness(engine) as harness:
            document = (await harness.client.get("/openapi.json")).json()
            assert "securitySchemes" not in document["components"]
            assert "422" not in str(
                document["paths"]["/v1/completions"]["post"]["responses"].keys()
            )
        async with http_harness(engine, keys=ApiKeys([("schema", KEY)])) as harness:
            document = (await harness.client.get("/openapi.json")).json()
            guarded = {
                path
                for path, operations in document["paths"].items()
                if all("security" in operation for operation in operations.values())
            }
            assert guarded == {path for path in document["paths"] if "health" not in path}

    run(main())
