"""What `jaxinfer help` and `--help` print: the subcommands, and the flags of one."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from types import ModuleType

from absl import flags

from jaxinfer.cli.commands import COMMANDS

INDENT = " " * 6
REPEATED = ";\n    repeat this option"  # absl ends the help of a repeated flag so
PLACEHOLDERS = {"int": "N", "float": "X"}


def overview() -> str:
    """Describe the command: every subcommand with its summary."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:{width}}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "jaxinfer: inference and serving of language models on TPU, GPU and CPU",
            "",
            *lines,
            "",
            "  jaxinfer SUBCOMMAND --help      the flags that are needed most",
            "  jaxinfer SUBCOMMAND --helpfull  all flags, and more about the subcommand",
            "  jaxinfer --version",
        ]
    )


def group_help(group: str) -> str:
    """Describe the subcommands whose names begin with this word, as `bench` does; "" if none do."""
    names = [name for name in COMMANDS if name.startswith(f"{group} ")]
    width = max(map(len, names), default=0) + 2
    return "\n".join(f"  jaxinfer {name:{width}}{COMMANDS[name].summary}" for name in names)


def command_help(program: str, module: ModuleType, *, full: bool) -> str:
    """Describe a program by its module: what it does, examples, its flags in groups.

    Where `full`, the module's whole docstring and every flag there is, absl's own among them.
    """
    text = inspect.cleandoc(module.__doc__ or "")
    paragraphs = text.split("\n\n")
    groups: Mapping[str, Iterable[str]] = getattr(module, "HELP", {})
    own = [flag.name for flag in flags.FLAGS.get_key_flags_for_module(module.__name__)]
    groups = groups or {"Flags": own}
    if full:
        shown = {flag for group in groups.values() for flag in group}
        others = [flag for flag in own if flag not in shown]
        shown.update(others)
        everything = sorted({flags.FLAGS[flag].name for flag in flags.FLAGS} - shown)
        groups = {**groups, "More flags": others, "Logging and debugging": everything}
    else:
        examples = [p for p in paragraphs[1:] if p.startswith("    ")][:1]
        paragraphs = [*paragraphs[:1], *examples]
    parts = [f"{program}: {paragraphs[0]}", *paragraphs[1:]]
    parts += [f"{title}:\n" + "\n".join(map(flag_help, g)) for title, g in groups.items() if g]
    if not full:
        parts.append(f"`{program} --helpfull` has all flags.")
    return "\n\n".join(parts)


def flag_help(name: str) -> str:
    """Describe a flag: its name, the kind of its value, its help, and its default."""
    flag = flags.FLAGS[name]
    kind = flag.flag_type()
    if flag.boolean:
        head = f"--[no]{flag.name}"
    elif isinstance(flag, flags.EnumFlag):
        head = f"--{flag.name}={'|'.join(flag.parser.enum_values)}"
    else:
        head = f"--{flag.name}={PLACEHOLDERS.get(kind, 'TEXT')}"
    text = (flag.help or "").partition(REPEATED)[0]
    if isinstance(flag, flags.EnumFlag):
        text = text.removeprefix(f"<{'|'.join(flag.parser.enum_values)}>: ")
    if flag.default not in (None, False, [], ""):
        default = flag.default
        text += f" (default: {','.join(default) if isinstance(default, list) else default})"
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    return f"  {head}\n" + textwrap.fill(
        " ".join(text.split()), width, initial_indent=INDENT, subsequent_indent=INDENT
    )
