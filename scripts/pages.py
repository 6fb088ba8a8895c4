# SPDX-License-Identifier: Apache-2.0
"""Write man pages and shell completions below a directory; for `make install`.

They are made from the commands, and from the table of hooks that `--help` prints, so they have
every option and no other.

    pages.py DIRECTORY [nvidia] [NODE]

"nvidia": the incumbent's names as well. NODE: the program gpu-node as well; the directory with
what it needs besides gpuruntime's dependencies.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

import click
from click import shell_completion

from gpuruntime.cli import container_cli, lazy
from gpuruntime.cli import main as cli
from gpuruntime.plan import gpu_edits
from gpuruntime.system import hook_usage

# Where each shell looks for the completion of the program {}.
PLACES = {
    "bash": "bash-completion/completions/{}",
    "zsh": "zsh/site-functions/_{}",
    "fish": "fish/vendor_completions.d/{}.fish",
}
RUNTIME = "gpu-container-runtime"
PRESTART_HOOK = f"{RUNTIME}-hook"
# Page → the incumbent's names of its program.
INCUMBENT_NAMES = {
    RUNTIME: (
        *("nvidia-container-runtime", "nvidia-container-runtime.cdi"),
        "nvidia-container-runtime.legacy",
    ),
    PRESTART_HOOK: ("nvidia-container-runtime-hook", "nvidia-container-toolkit"),
    gpu_edits.HOOK_NAME: ("nvidia-cdi-hook",),
}
# The runtime has the low-level runtime's command line, and so no help of its own.
RUNTIME_TEXT = """\
Container engines call this program; people call "gpuruntime". It is an OCI runtime in front of
another one. At "create", it reads config.json of the bundle, and adds the devices and the driver's
files that the container requests. Then, and at once for every other command, it becomes the
low-level runtime: runc or crun, if the configuration names no other. It passes on its command line
unchanged.
"""
RUNTIME_STATUS = """\
That of the low-level runtime; 127 if there is none, or no Python, 126 if it cannot be executed,
and 1 if the container cannot get what it requests.
"""
RUNTIME_VARIABLES = {
    "GPURUNTIME_FAST": '"off": Python handles every call. "only": a call that needs Python fails. '
    "For tests.",
}
FILES = {
    "/etc/gpuruntime/config.toml, /etc/nvidia-container-runtime/config.toml": "The configuration: "
    'the first that exists. "gpuruntime config show" prints every option.',
    "/run/gpuruntime": "The compiled configuration and saved results. It can be removed at any "
    "time.",
}


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


def head(title: str, section: int, purpose: str, usage: str, text: str) -> list[str]:
    """Return the lines with which a page begins."""
    return [
        f'.TH "{title.upper()}" "{section}" "" "gpuruntime" ""',
        *(".SH NAME", f"{plain(title)} \\- {plain(purpose)}"),
        *(".SH SYNOPSIS", plain(usage)),
        *(".SH DESCRIPTION", *paragraphs(text)),
    ]


def listed(heading: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return the lines of a list of words and their meanings; none without *rows*."""
    lines = [
        line
        for words, text in rows
        for line in (".TP", f".B {plain(words)}", plain(" ".join(text.split())))
    ]
    return [f".SH {heading}", *lines] if lines else []


def page(name: str, command: click.Command, context: click.Context) -> str:
    """Return the man page of *command*, which users call by *name*."""
    title = name.replace(" ", "-")
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    lines = head(title, 1, command.get_short_help_str(200), usage, command.help or "")
    options = command.get_params(context)
    lines += listed("OPTIONS", filter(None, (item.get_help_record(context) for item in options)))
    if isinstance(command, click.Group):
        lines.append(".SH COMMANDS")
        for word in command.list_commands(context):
            child = command.get_command(context, word)
            if child is not None and not child.hidden:
                lines += [".TP", f".BR {plain(f'{title}-{word}')} (1)"]
                lines.append(plain(child.get_short_help_str(200)))
    variables = [
        (name, f"Sets {option.opts[0]}.")
        for option in options
        for name in lazy.variables_of(option)
    ]
    if command is cli.root:
        variables += cli.VARIABLES.items()
    lines += listed("ENVIRONMENT", variables)
    return "\n".join([*lines, ""])


def runtime_page() -> str:
    """Return the man page of the runtime."""
    usage = f"{RUNTIME} [OPTIONS OF THE LOW-LEVEL RUNTIME] COMMAND [ARGS]..."
    config = {name: text for name, text in cli.VARIABLES.items() if "config" in text}
    lines = [
        *head(RUNTIME, 8, "give GPUs to containers", usage, RUNTIME_TEXT),
        *(".SH EXIT STATUS", *paragraphs(RUNTIME_STATUS)[1:]),
        *listed("FILES", FILES.items()),
        *listed("ENVIRONMENT", {**config, **RUNTIME_VARIABLES}.items()),
        ".SH SEE ALSO",
        ".BR gpuruntime (1),",
        ".BR gpuruntime\\-explain (1),",
        ".BR gpuruntime\\-runtime\\-configure (1)",
    ]
    return "\n".join([*lines, ""])


def rows(options: Iterable[tuple[str, str, str]]) -> list[tuple[str, str]]:
    """Return *options* of the table of hooks as words and their meanings."""
    return [(f"{name} {value}".rstrip(), text) for name, value, text in options]


def hook_page() -> str:
    """Return the man page of the hook program, with every hook."""
    name = gpu_edits.HOOK_NAME
    usage = f"{name} [OPTION...] HOOK [OPTION...]"
    purpose = "work in a container's root for a CDI spec"
    lines = head(name, 8, purpose, usage, hook_usage.ABOUT)
    for hook, (text, options) in hook_usage.HOOKS.items():
        lines += [f'.SH "{hook.upper()}"', plain(text), *listed("", rows(options))[1:]]
    lines += listed("OPTIONS OF EVERY HOOK", rows(hook_usage.COMMON))
    return "\n".join([*lines, ""])


def prestart_page() -> str:
    """Return the man page of the prestart hook."""
    usage = f"{PRESTART_HOOK} [-debug] [-config FILE] {hook_usage.PRESTART_ARGUMENTS}"
    purpose = "bring the driver's files into a container"
    lines = head(PRESTART_HOOK, 8, purpose, usage, hook_usage.ABOUT_PRESTART)
    lines += listed("OPTIONS", rows(hook_usage.PRESTART))
    lines += listed("FILES", FILES.items())
    return "\n".join([*lines, ""])


def write_pages(place: str, name: str, command: click.Command, parent: Any = None) -> None:  # noqa: ANN401 (a context or None)
    """Write the man page of *command*, and those of its commands."""
    context = click.Context(command, info_name=name.rpartition(" ")[2], parent=parent)
    path = os.path.join(place, "man", "man1", f"{name.replace(' ', '-')}.1")
    write(path, page(name, command, context))
    if isinstance(command, click.Group):
        for word in command.list_commands(context):
            child = command.get_command(context, word)
            if child is not None and not child.hidden:
                write_pages(place, f"{name} {word}", child, context)


def write_completions(
    place: str, name: str, command: click.Command, variable: str = cli.COMPLETE_VARIABLE
) -> None:
    """Write the script by which each shell asks the program *name* for completions."""
    for shell, pattern in PLACES.items():
        kind = shell_completion.get_completion_class(shell)
        assert kind is not None
        asking = kind(command, {}, name, variable)
        # Not `source()`, which looks at the shell of the machine that builds.
        text = asking.source_template % asking.source_vars()
        write(os.path.join(place, pattern.format(name)), f"{text.strip()}\n")


def write_node_pages(place: str, directory: str) -> None:
    """Write pages and completions of gpu-node, whose dependencies are in *directory*."""
    sys.path.append(directory)
    from gpunode.cli import main as node  # noqa: PLC0415 (it is not always there)

    write_pages(place, node.PROGRAM, node.root)
    write_completions(place, node.PROGRAM, node.root, node.COMPLETE_VARIABLE)


def main() -> None:
    """Write below the directory of the first argument."""
    place, *words = sys.argv[1:]
    node = [word for word in words if word != "nvidia"]
    write_pages(place, "gpuruntime", cli.root)
    write_completions(place, "gpuruntime", cli.root)
    pages = {
        RUNTIME: runtime_page(),
        PRESTART_HOOK: prestart_page(),
        gpu_edits.HOOK_NAME: hook_page(),
    }
    links = {}
    for name, text in pages.items():
        write(os.path.join(place, "man", "man8", f"{name}.8"), text)
        if "nvidia" in words:
            links |= dict.fromkeys(INCUMBENT_NAMES[name], (8, f"{name}.8"))
    if "nvidia" in words:
        write_pages(place, container_cli.PROGRAM, container_cli.root)
        write_completions(place, "nvidia-ctk", cli.root)
        write_completions(place, container_cli.PROGRAM, container_cli.root)
        links["nvidia-ctk"] = (1, "gpuruntime.1")
    if node:
        write_node_pages(place, node[0])
    for name, (section, target) in links.items():
        path = os.path.join(place, "man", f"man{section}", f"{name}.{section}")
        write(path, f".so man{section}/{target}\n")


main()
