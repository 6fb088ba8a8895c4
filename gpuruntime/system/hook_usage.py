# SPDX-License-Identifier: Apache-2.0
"""The usage of the hook program: its hooks, their options, and the help text made from them.

Loaded only for `--help`. The command line (`gpuruntime hook`) and the man pages read it too.
"""

from __future__ import annotations

# Hook → its purpose, and its options: (option, value or "", meaning).
HOOKS: dict[str, tuple[str, tuple[tuple[str, str, str], ...]]] = {
    "update-container": (
        "Do all steps of a CDI spec in one process.",
        (
            ("--link", "TARGET::LINK", "Create the symlink LINK to TARGET."),
            ("--device-link", "TARGET::LINK", "Create the symlink if TARGET exists."),
            ("--library", "SONAME::PATH::ABI", "Add a library to the loader cache."),
            (
                "--cuda-compat",
                "VERSION",
                "Prefer the CUDA libraries of the image if they fit this driver version.",
            ),
            (
                "--cuda-compat-cuda",
                "VERSION",
                "The same on a Tegra, whose driver is known by its CUDA version.",
            ),
            (
                "--cuda-compat-root",
                "DIRECTORY",
                "Directory of these libraries, on a Tegra.  [default: /usr/local/cuda/compat]",
            ),
            (
                "--ldconfig-mode",
                "MODE",
                '"merge" (default), "none", or "host": run the host\'s ldconfig if a merge fails.',
            ),
            ("--ldconfig-path", "PATH", "The host's ldconfig.  [default: /sbin/ldconfig]"),
            ("--mask-params", "", "Hide that the driver may create device nodes."),
            ("--application-profile", "", "List the container's GPUs for the driver's libraries."),
            ("--chmod", "MODE::PATH", "Change the permissions of PATH if it exists."),
            ("--ahead", "", "Do only the steps that are possible before the mounts."),
        ),
    ),
    "create-symlinks": (
        "Create symlinks in the container.",
        (("--link", "TARGET::LINK", "Create the symlink LINK to TARGET; repeatable."),),
    ),
    "update-ldcache": (
        "Add mounted libraries to the container's loader cache.",
        (
            ("--folder", "DIR", "Directory of mounted libraries; repeatable."),
            ("--ldconfig-path", "PATH", "Accepted for compatibility; no ldconfig is run."),
        ),
    ),
    "enable-cuda-compat": (
        "Use the CUDA compatibility libraries of the image if they fit the driver.",
        (
            ("--host-driver-version", "VERSION", "Version of the host's driver."),
            ("--host-cuda-version", "VERSION", "CUDA version of the host's driver."),
            (
                "--cuda-compat-container-root",
                "DIR",
                "Directory of the libraries in the container.  [default: /usr/local/cuda/compat]",
            ),
        ),
    ),
    "disable-device-node-modification": ("Hide that the driver may create device nodes.", ()),
    "update-application-profile": ("List the container's GPUs for the driver's libraries.", ()),
    "chmod": (
        "Change the permissions of paths in the container.",
        (
            ("--mode", "OCTAL", "The new permissions."),
            ("--path", "PATH", "Path in the container; repeatable."),
        ),
    ),
    "noop": ("Do nothing.", ()),
}
COMMON = (
    ("--container-spec", "FILE", 'OCI state; "-" for standard input.  [default: -]'),
    ("--deadline", "SECONDS", "Time for the work, from 1 to 600.  [default: 10]"),
    ("--debug", "", "Print each step on standard error."),
    ("--quiet", "", "Print errors only."),
    ("--help", "", "Print this text and exit."),
)
PRESTART = (
    ("-config", "FILE", "Config file.  [default: the one in force]"),
    ("-debug", "", "Print each step on standard error."),
    ("-version", "", "Print the version and exit."),
    ("-help", "", "Print this text and exit."),
)
# What the programs are, in paragraphs of lines.
ABOUT = """\
CDI specs call this program, with the OCI state on standard input. It reads no
environment variable, so NVIDIA_CDI_DEBUG and NVIDIA_CDI_QUIET have no effect: use
--debug and --quiet. An unknown hook is a warning, wrong options exit with 2.
"""
ABOUT_PRESTART = """\
OCI runtimes call this program, with the OCI state on standard input. It mounts the
driver's files that the container requests, and allows devices that the container may not
use yet. poststart and poststop do nothing.
"""
PRESTART_ARGUMENTS = "prestart|poststart|poststop"
_WIDTH = 96


def of_program(program: str) -> str:
    """Return the help text of *program*, with its hooks."""
    rows = [(name, purpose) for name, (purpose, _) in HOOKS.items()]
    return (
        f"usage: {program} [OPTION...] HOOK [OPTION...]\n\n{ABOUT}"
        f'"{program} HOOK --help" describes a hook.\n\n'
        f"Hooks:\n{_table(rows)}\nOptions:\n{_options(COMMON)}"
    )


def of_hook(program: str, name: str) -> str:
    """Return the help text of the hook *name*, a key of HOOKS."""
    purpose, options = HOOKS[name]
    own = f"Options:\n{_options(options)}\n" if options else ""
    return (
        f"usage: {program} {name} [OPTION...]\n\n{purpose}\n\n"
        f"{own}Options of every hook:\n{_options(COMMON)}"
    )


def of_prestart(program: str) -> str:
    """Return the help text of *program*, the prestart hook."""
    return (
        f"usage: {program} [-debug] [-config FILE] {PRESTART_ARGUMENTS}\n\n{ABOUT_PRESTART}\n"
        f"Options:\n{_options(PRESTART)}"
    )


def _options(options: tuple[tuple[str, str, str], ...]) -> str:
    return _table([(f"{name} {value}".rstrip(), text) for name, value, text in options])


def _table(rows: list[tuple[str, str]]) -> str:
    """Return *rows* as two columns, with the second one wrapped."""
    column = max(len(first) for first, _ in rows) + len("  ") * 2
    text = ""
    for first, second in rows:
        line = f"  {first}".ljust(column - 1)
        for word in second.split(" "):
            if len(line) + len(f" {word}") > _WIDTH:
                text += f"{line}\n"
                line = " " * (column - 1)
            line += f" {word}"
        text += f"{line}\n"
    return text
