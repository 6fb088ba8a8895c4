# SPDX-License-Identifier: Apache-2.0
"""Write man pages and shell completions of the command line below a directory; for `make install`.

Both come from the commands themselves, so they cannot tell of an option that is not there.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import click
from click import shell_completion

from gpuruntime.cli import container_cli
from gpuruntime.cli import main as cli

# Where each shell looks for the completion of the program {}.
PLACES = {
    "bash": "bash-completion/completions/{}",
    "zsh": "zsh/site-functions/_{}",
    "fish": "fish/vendor_completions.d/{}.fish",
}
RUNTIME_PAGE = "gpu-container-runtime.8"
RUNTIME_NAMES = ("gpu-container-runtime-hook", "gpu-cdi-hook")
INCUMBENT_NAMES = (
    "nvidia-container-runtime",
    "nvidia-container-runtime.cdi",
    "nvidia-container-runtime.legacy",
    "nvidia-container-runtime-hook",
    "nvidia-container-toolkit",
    "nvidia-cdi-hook",
)


def write(path: str, text: str) -> None:
    """Write a file, and the directories that it needs."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)


def plain(text: str) -> str:
    """Return *text* as troff prints it unchanged."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    text = "".join(char if char.isascii() else f"\\[u{ord(char):04X}]" for char in text)
    return "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line for line in text.split("\n"))


def paragraphs(text: str) -> list[str]:
    r"""Return the lines of a help text; what follows click's \b keeps its line breaks."""
    lines = []
    for paragraph in text.split("\n\n"):
        head, _, rest = paragraph.partition("\n")
        if head.strip() == "\b":
            lines += [".PP", ".nf", plain(rest), ".fi"]
        else:
            lines += [".PP", plain(" ".join(paragraph.split()))]
    return lines


def page(name: str, command: click.Command, context: click.Context) -> str:
    """Return the man page of *command*, which users call by *name*."""
    title = name.replace(" ", "-")
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    lines = [
        f'.TH "{title.upper()}" "1" "" "gpuruntime" ""',
        *(".SH NAME", f"{plain(title)} \\- {plain(command.get_short_help_str(200))}"),
        *(".SH SYNOPSIS", plain(usage)),
        *(".SH DESCRIPTION", *paragraphs(command.help or "")),
    ]
    records = [option.get_help_record(context) for option in command.get_params(context)]
    lines.append(".SH OPTIONS")
    for words, text in filter(None, records):
        lines += [".TP", f".B {plain(words)}", plain(" ".join(text.split()))]
    if isinstance(command, click.Group):
        lines.append(".SH COMMANDS")
        for word in command.list_commands(context):
            found = command.get_command(context, word)
            if found is not None and not found.hidden:
                lines += [".TP", f".BR {plain(f'{title}-{word}')} (1)"]
                lines.append(plain(found.get_short_help_str(200)))
    return "\n".join([*lines, ""])


def write_pages(place: str, name: str, command: click.Command, parent: Any = None) -> None:  # noqa: ANN401 (a context or None)
    """Write the man page of *command*, and those of its commands."""
    context = click.Context(command, info_name=name.rpartition(" ")[2], parent=parent)
    path = os.path.join(place, "man", "man1", f"{name.replace(' ', '-')}.1")
    write(path, page(name, command, context))
    if isinstance(command, click.Group):
        for word in command.list_commands(context):
            found = command.get_command(context, word)
            if found is not None and not found.hidden:
                write_pages(place, f"{name} {word}", found, context)


def write_completions(place: str, name: str, command: click.Command) -> None:
    """Write the script by which each shell asks the program *name* for completions."""
    for shell, pattern in PLACES.items():
        kind = shell_completion.get_completion_class(shell)
        assert kind is not None
        asking = kind(command, {}, name, cli.COMPLETE_VARIABLE)
        # Not `source()`, which looks at the shell of the machine that builds.
        text = asking.source_template % asking.source_vars()
        write(os.path.join(place, pattern.format(name)), f"{text.strip()}\n")


def main() -> None:
    """Write below the directory of the first argument; the second may be "nvidia"."""
    place, *compat = sys.argv[1:]
    write_pages(place, "gpuruntime", cli.root)
    write_completions(place, "gpuruntime", cli.root)
    links = dict.fromkeys(RUNTIME_NAMES, (8, RUNTIME_PAGE))
    if compat == ["nvidia"]:
        write_pages(place, container_cli.PROGRAM, container_cli.root)
        write_completions(place, "nvidia-ctk", cli.root)
        write_completions(place, container_cli.PROGRAM, container_cli.root)
        links |= dict.fromkeys(INCUMBENT_NAMES, (8, RUNTIME_PAGE))
        links["nvidia-ctk"] = (1, "gpuruntime.1")
    for name, (section, target) in links.items():
        path = os.path.join(place, "man", f"man{section}", f"{name}.{section}")
        write(path, f".so man{section}/{target}\n")


main()
