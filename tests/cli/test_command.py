"""The `jaxinfer` command: it finds subcommands, prints help, and refuses what is wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxinfer import __version__
from jaxinfer.cli.commands import COMMANDS, UnknownCommand, find_command
from jaxinfer.serving.config import ServingConfig
from tests.support.command_line import Result, run_all
from tests.support.paths import ROOT, SCRIPTS

HELP = [[*name.split(), "--help"] for name in COMMANDS]
FULL_HELP = [[*name.split(), "--helpfull"] for name in COMMANDS]
LINES = [
    *HELP,
    *FULL_HELP,
    [],
    ["help"],
    ["--help"],
    ["help", "serve"],
    ["help", "bench"],
    ["--version"],
    ["sreve"],
    ["bench"],
    ["bench", "sreve"],
    ["serve", "--no_such_flag=1"],
    ["serve", "model"],
    ["generate", "--top_k=many"],
    ["embed", "--text=a"],
]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[tuple[str, ...], Result]:
    return run_all(LINES, tmp_path_factory.mktemp("command"))


def test_find_command_splits_names_of_one_and_two_words():
    assert find_command(["serve", "--model=demo"]) == ("serve", ["--model=demo"])
    assert find_command(["bench", "serve", "--rate=2"]) == ("bench serve", ["--rate=2"])
    with pytest.raises(
        UnknownCommand, match=r"no subcommand 'bech', the closest is bench; .*serve"
    ):
        find_command(["bech"])
    with pytest.raises(UnknownCommand, match="no subcommand 'zzzz'; the subcommands are generate"):
        find_command(["zzzz"])


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_subcommand_is_short_and_shows_its_flags(results, name):
    code, stdout, stderr = results[(*name.split(), "--help")]
    assert code == 0 and not stderr
    assert stdout.startswith(f"jaxinfer {name}: ")
    assert "--" in stdout and "--alsologtostderr" not in stdout
    assert f"`jaxinfer {name} --helpfull`" in stdout
    if COMMANDS[name].module.startswith("jaxinfer.cli."):
        assert f"    jaxinfer {name} --" in stdout, "an example"
        assert len(stdout.splitlines()) <= 70


@pytest.mark.parametrize("name", COMMANDS)
def test_full_help_of_a_subcommand_has_every_flag(results, name):
    code, stdout, _ = results[(*name.split(), "--helpfull")]
    short = results[(*name.split(), "--help")].stdout
    assert code == 0 and "--verbosity" in stdout
    flags = {line for line in short.splitlines() if line.startswith("  --")}
    assert flags and flags <= set(stdout.splitlines())


def test_help_of_serve_names_the_default_ports(results):
    lines = results["serve", "--help"].stdout.splitlines()
    config = ServingConfig()
    for name, port in (("http", config.http_port), ("grpc", config.grpc_port)):
        assert f"(default: {port})" in lines[lines.index(f"  --{name}_port=TEXT") + 1]


def test_help_lists_every_subcommand(results):
    code, overview, _ = results["help",]
    assert code == 0 and all(f"  {name} " in overview for name in COMMANDS)
    assert results["--help",] == results["help",]
    assert results["help", "serve"] == results["serve", "--help"]
    kinds = results["help", "bench"]
    assert kinds.code == 0 and "  jaxinfer bench loading  " in kinds.stdout
    assert results[()] == Result(2, "", overview)


def test_version_is_the_packages(results):
    assert results["--version",] == Result(0, f"jaxinfer {__version__}\n", "")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (("sreve",), "no subcommand 'sreve', the closest is serve; the subcommands are generate,"),
        (("bench",), "give one of bench offline, bench serve, bench loading, bench compile"),
        (("bench", "sreve"), "'sreve' is none of bench offline"),
        (("serve", "--no_such_flag=1"), "Unknown command line flag 'no_such_flag'"),
        (("serve", "model"), "unexpected arguments: model"),
        (("generate", "--top_k=many"), "--top_k=many"),
        (("embed", "--text=a"), "--model"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line_with_2(results, line, reason):
    code, stdout, stderr = results[line]
    assert code == 2 and not stdout
    [said] = stderr.splitlines()
    assert said.startswith("error: ") and reason in said


def test_the_module_and_the_script_are_the_command():
    for start in (["-m", "jaxinfer", "serve"], [str(SCRIPTS / "serve.py")]):
        done = subprocess.run(
            [sys.executable, *start, "--nosuch"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 2 and done.stderr == "error: Unknown command line flag 'nosuch'\n"


def test_every_script_is_short_and_every_subcommand_has_one():
    texts = [path.read_text("utf-8") for path in sorted(SCRIPTS.glob("*.py"))]
    assert sum(len(text.splitlines()) for text in texts) <= 600
    for name in COMMANDS:
        words = ", ".join(f'"{word}"' for word in name.split())
        wanted = f"main([{words}, *sys.argv[1:]])"
        assert name == "chat" or any(wanted in text for text in texts), name
