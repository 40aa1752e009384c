"""The `jaxinfer` command.

    jaxinfer help
    jaxinfer serve --model=demo --config=demo
    jaxinfer bench offline --repeats=3

Exit code 2: there is no such subcommand, or a flag of it is wrong; stderr says in one line why.
Otherwise the code is the subcommand's.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from absl import app, flags, logging

from jaxinfer import __version__
from jaxinfer.cli.commands import COMMANDS, UnknownCommand, find_command
from jaxinfer.cli.help import command_help, group_help, overview

FLAGS = flags.FLAGS
HELP_FLAGS = ("-h", "-?", "--help", "-help", "--helpshort")
FULL_HELP_FLAGS = ("--helpfull", "-helpfull")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that the arguments name; `sys.argv` holds them by default.

    Returns an exit code, or leaves by `SystemExit` with the subcommand's.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        print(overview(), file=sys.stderr)
        return 2
    if words[0] in ("--version", "version"):
        print(f"jaxinfer {__version__}")
        return 0
    if words[0] == "help" and words[1:]:
        words = [*words[1:], "--help"]
    if words[0] in ("help", *HELP_FLAGS, *FULL_HELP_FLAGS):
        print(overview())
        return 0
    if words[1:2] and words[1] in HELP_FLAGS and (text := group_help(words[0])):
        print(text)
        return 0
    try:
        name, rest = find_command(words)
    except UnknownCommand as error:
        return refuse(str(error))
    module = importlib.import_module(COMMANDS[name].module)
    return run(f"jaxinfer {name}", module, rest)


def run(program: str, module: ModuleType, arguments: Sequence[str]) -> int:
    """Parse the flags of a module and run its `main`, or print its help.

    Scripts call this for tools that are no subcommands; `program` is what their help calls them.
    """
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    full = any(word in FULL_HELP_FLAGS for word in options)
    if full or any(word in HELP_FLAGS for word in options):
        print(command_help(program, module, full=full))
        return 0

    def guarded(argv: list[str]) -> Any:
        if argv[1:]:
            return refuse(f"unexpected arguments: {' '.join(argv[1:])}")
        if not FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # jax reports each platform it does not find
        try:
            return module.main(argv)
        except app.UsageError as error:
            return refuse(str(error))
        except KeyboardInterrupt:
            return 130
        except BrokenPipeError:  # the reader of our output has left
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0

    app.run(guarded, argv=[program, *arguments], flags_parser=parse_flags)
    raise AssertionError("app.run returns by SystemExit")


def parse_flags(argv: list[str]) -> list[str]:
    """Parse flags as absl does, but refuse a wrong one in one line and with exit code 2."""
    try:
        return FLAGS(argv)
    except flags.Error as error:
        sys.exit(refuse(" ".join(str(error).split())))


def refuse(why: str) -> int:
    """Say on stderr why nothing was run, and return the exit code for that."""
    print(f"error: {why}", file=sys.stderr)
    return 2
