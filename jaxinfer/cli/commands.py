"""The subcommands of `jaxinfer` by name: the module of each, and what it does in one line.

A module has `main(argv)`, defines its absl flags when it is imported, and may have `HELP`: the
flags that its `--help` shows, by the title of their group. Several modules define flags of the same
names, so only the module of the chosen subcommand is imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """One subcommand."""

    module: str
    summary: str


COMMANDS = {
    "generate": Command("jaxinfer.cli.generate", "complete a prompt, or a file of prompts"),
    "chat": Command("jaxinfer.cli.chat", "talk to a model in the terminal"),
    "serve": Command("jaxinfer.cli.serve", "serve a model over HTTP and gRPC"),
    "embed": Command("jaxinfer.cli.embed", "embed texts with an encoder"),
    "convert": Command("jaxinfer.cli.convert", "convert a checkpoint, quantized or not"),
    "plan": Command(
        "jaxinfer.cli.plan", "tell whether a model fits some chips, and how fast it is"
    ),
    "bench offline": Command("jaxinfer.tools.bench.offline", "measure generation without a server"),
    "bench serve": Command("jaxinfer.tools.bench.serve", "load a server, this one or another"),
    "bench loading": Command("jaxinfer.tools.bench.loading", "measure the loading of weights"),
    "bench compile": Command("jaxinfer.tools.bench.compile_time", "measure tracing and compiling"),
    "tune": Command("jaxinfer.tools.tuner.tune", "find the best tilings of the kernels"),
    "doctor": Command("jaxinfer.tools.device_check.check", "check kernels and engine on a GPU"),
    "compile-check": Command(
        "jaxinfer.tools.compile_gate.check", "compile for chips that are not at hand"
    ),
}


class UnknownCommand(ValueError):
    """The words name no subcommand."""


def find_command(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Split a command line into the name of its subcommand and the arguments for that.

    Raises `UnknownCommand` with the closest name and all names.
    """
    words = list(arguments)
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in COMMANDS:
            return name, words[length:]
    if kinds := [name for name in COMMANDS if name.startswith(f"{words[0]} ")]:
        given = f" {words[1]!r} is none of" if words[1:] and words[1][:1] != "-" else " give one of"
        raise UnknownCommand(f"{words[0]}:{given} {', '.join(kinds)}")
    names = dict.fromkeys(name.split()[0] for name in COMMANDS)
    closest = difflib.get_close_matches(words[0], names, n=1)
    hint = f", the closest is {closest[0]}" if closest else ""
    raise UnknownCommand(
        f"there is no subcommand {words[0]!r}{hint}; the subcommands are {', '.join(names)}"
    )
