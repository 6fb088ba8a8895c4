# SPDX-License-Identifier: Apache-2.0
"""The table of config.toml's options: key, type, default, purpose; and the texts made from it.

Pure; not on the start path, which has the defaults in gpuruntime/config.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping

Value = str | int | bool | list[str] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One key of config.toml.

    *kind* is a word of KINDS. *choices* are the values there are, of a list those of its items;
    if *strict*, another one is an error. The incumbent takes any, and so do we for its keys.
    *sample* is what the example shows, commented out, where the default would show nothing.
    *acts*: we do act on it; else it is accepted for the incumbent's sake, or not there yet.
    """

    key: str
    kind: str
    default: Value
    doc: str
    _: dataclasses.KW_ONLY
    sample: Value = None
    choices: tuple[str, ...] = ()
    strict: bool = False
    acts: bool = False

    @property
    def table(self) -> str:
        """Return the name of the table that the key is in, "" for the root."""
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        """Return the last part of the key."""
        return self.key.rpartition(".")[2]


# Kind → how a message calls it.
KINDS = {
    "bool": "true or false",
    "optional": "true or false",
    "integer": "a whole number above 0",
    "string": "a string",
    "list": "a list of strings",
}
CAPABILITIES = ("compat32", "compute", "display", "graphics", "ngx", "utility", "video")
HOOKS = (
    "all",
    "chmod",
    "create-symlinks",
    "disable-device-node-modification",
    "enable-cuda-compat",
    "update-application-profile",
    "update-ldcache",
)
FLAGS = (
    "disable-ipc-discoverer",
    "disable-multiple-csv-devices",
    "disable-nvsandbox-utils",
    "disable-nvsandboxutils",
    "enable-coherent-annotations",
    "enable-explicit-driver-libraries",
    "no-additional-gids-for-device-nodes",
)
_ACCEPT = "accept-nvidia-visible-devices"
_CLI = "nvidia-container-cli"
_RUNTIME = "nvidia-container-runtime"
_MODES = f"{_RUNTIME}.modes"

# By table, and in a table by key: the order of the example.
OPTIONS = (
    Option(
        f"{_ACCEPT}-as-volume-mounts",
        "bool",
        default=False,
        doc="Containers may ask for GPUs by mounts of /dev/null below "
        "/var/run/nvidia-container-devices.",
        sample=False,
        acts=True,
    ),
    Option(
        f"{_ACCEPT}-envvar-when-unprivileged",
        "bool",
        default=True,
        doc="Containers without CAP_SYS_ADMIN may ask for GPUs by environment variables.",
        sample=True,
        acts=True,
    ),
    Option(
        "disable-require",
        "bool",
        default=False,
        doc="What images require of the host by NVIDIA_REQUIRE_ variables is not checked.",
        acts=True,
    ),
    Option(
        "discovery-timeout",
        "integer",
        default=30,
        doc="Seconds that the driver has to answer when GPUs are looked for.",
        acts=True,
    ),
    Option(
        "health",
        "string",
        default="",
        doc='"nvml": ask the driver at each start whether the GPUs are still there; '
        '"": believe their files.',
        choices=("", "nvml"),
        strict=True,
        acts=True,
    ),
    Option(
        "hook-deadline",
        "integer",
        default=10,
        doc="Seconds, up to 600, that a hook has to work in a container's root; a spec's hook has "
        "them by its argument --deadline.",
        acts=True,
    ),
    Option(
        "ldconfig-mode",
        "string",
        default="merge",
        doc='The loader cache of a container: "merge" adds the driver to it and runs nothing; '
        '"host" runs the host\'s ldconfig, confined, where that cannot be; "none" leaves it.',
        choices=("merge", "host", "none"),
        strict=True,
        acts=True,
    ),
    Option(
        "missing-gpu",
        "string",
        default="error",
        doc='A GPU that was asked for and cannot be given: "error" fails the container, '
        '"warn" lets it start without.',
        choices=("error", "warn"),
        strict=True,
        acts=True,
    ),
    Option(
        "supported-driver-capabilities",
        "string",
        default=",".join(CAPABILITIES),
        doc="The driver capabilities that containers may ask for; "
        "`all` in an image stands for these.",
        acts=True,
    ),
    Option(
        "swarm-resource",
        "string",
        default="",
        doc="Environment variables, separated by commas, that stand in for "
        "NVIDIA_VISIBLE_DEVICES.",
        sample="DOCKER_RESOURCE_GPU",
        acts=True,
    ),
    Option(
        "features.allow-cuda-compat-libs-from-container",
        "optional",
        default=None,
        doc="An unknown modes.legacy.cuda-compat-mode counts as ldconfig, not as disabled.",
        sample=True,
        acts=True,
    ),
    Option(
        "features.allow-ldconfig-from-container",
        "optional",
        default=None,
        doc='nvidia-container-cli.ldconfig may be a path in the container, without "@".',
        sample=True,
        acts=True,
    ),
    Option(
        "features.allow-unknown-oci-spec-fields",
        "optional",
        default=None,
        doc="No effect: unknown members of config.json are always kept.",
        sample=True,
    ),
    Option(
        "features.disable-cuda-compat-lib-hook",
        "optional",
        default=None,
        doc="CUDA's compatibility libraries of an image are never put to use.",
        sample=True,
        acts=True,
    ),
    Option(
        "features.disable-imex-channel-creation",
        "optional",
        default=None,
        doc="The prestart hook makes no device nodes of IMEX channels.",
        sample=True,
    ),
    Option(
        "features.ignore-imex-channel-requests",
        "optional",
        default=None,
        doc="No container gets an IMEX channel.",
        sample=True,
        acts=True,
    ),
    Option(
        "features.no-additional-gids-for-device-nodes",
        "optional",
        default=None,
        doc="The groups of device nodes are not given to the container's process.",
        sample=True,
        acts=True,
    ),
    Option(
        f"{_CLI}.debug",
        "string",
        default="",
        doc="Log file of nvidia-container-cli; none by default.",
        sample="/var/log/nvidia-container-toolkit.log",
    ),
    Option(
        f"{_CLI}.environment",
        "list",
        default=[],
        doc='Variables, as "NAME=VALUE", for nvidia-container-cli.',
    ),
    Option(
        f"{_CLI}.ldcache",
        "string",
        default="",
        doc="The loader cache of the driver root; its etc/ld.so.cache by default.",
        sample="/etc/ld.so.cache",
    ),
    Option(
        f"{_CLI}.ldconfig",
        "string",
        default="@/sbin/ldconfig",
        doc='The ldconfig of the host, after "@", for ldconfig-mode = "host".',
        acts=True,
    ),
    Option(
        f"{_CLI}.load-kmods",
        "bool",
        default=True,
        doc="Have the driver load its modules and make device nodes where one is missing.",
        acts=True,
    ),
    Option(
        f"{_CLI}.no-cgroups",
        "bool",
        default=False,
        doc="The prestart hook allows no device in the container's cgroup: a container that "
        "our runtime has not given its devices is refused.",
        acts=True,
        sample=False,
    ),
    Option(
        f"{_CLI}.no-pivot",
        "bool",
        default=False,
        doc="nvidia-container-cli uses no pivot_root(2).",
        sample=True,
    ),
    Option(
        f"{_CLI}.path",
        "string",
        default="",
        doc="The program nvidia-container-cli; searched on PATH by default.",
        sample="/usr/bin/nvidia-container-cli",
    ),
    Option(
        f"{_CLI}.root",
        "string",
        default="",
        doc="The driver root: where the driver's files are; / by default.",
        sample="/run/nvidia/driver",
        acts=True,
    ),
    Option(
        f"{_CLI}.user",
        "string",
        default="",
        doc="User and group of nvidia-container-cli while it asks the driver.",
        sample="root:video",
    ),
    Option(
        f"{_RUNTIME}.debug",
        "string",
        default="/dev/null",
        doc="A file that the runtime adds its records to, beside the log of the engine; "
        "/dev/null by default.",
        sample="/var/log/nvidia-container-runtime.log",
        acts=True,
    ),
    Option(
        f"{_RUNTIME}.log-level",
        "string",
        default="info",
        doc='What is recorded: "error", "warning", "info" or "debug". '
        'With "debug" every edit is one line.',
        choices=("panic", "fatal", "error", "warn", "warning", "info", "debug", "trace"),
        acts=True,
    ),
    Option(
        f"{_RUNTIME}.mode",
        "string",
        default="auto",
        doc='"cdi": devices come from the CDI specs in spec-dirs; "jit-cdi": from the machine '
        'as it is; "legacy": a prestart hook brings the files. '
        '"auto" is cdi for names of CDI, jit-cdi for others.',
        choices=("auto", "cdi", "jit-cdi", "legacy", "csv"),
        acts=True,
    ),
    Option(
        f"{_RUNTIME}.runtimes",
        "list",
        default=["runc", "crun"],
        doc="Low-level runtimes, the first that is there is used. A name is searched on PATH.",
        acts=True,
    ),
    Option(
        f"{_MODES}.cdi.annotation-prefixes",
        "list",
        default=["cdi.k8s.io/"],
        doc="Annotations whose key begins so ask for devices.",
        acts=True,
    ),
    Option(
        f"{_MODES}.cdi.default-kind",
        "string",
        default="nvidia.com/gpu",
        doc="The kind of a device that a container names without one: "
        "NVIDIA_VISIBLE_DEVICES=0 is nvidia.com/gpu=0.",
        acts=True,
    ),
    Option(
        f"{_MODES}.cdi.spec-dirs",
        "list",
        default=["/etc/cdi", "/var/run/cdi"],
        doc="Where CDI specs are looked for. A later directory wins over an earlier one.",
        acts=True,
    ),
    Option(
        f"{_MODES}.csv.compat-container-root",
        "string",
        default="",
        doc="Where an image for Orin has CUDA's compatibility libraries; "
        "/usr/local/cuda/compat_orin by default.",
        sample="/usr/local/cuda/compat_orin",
    ),
    Option(
        f"{_MODES}.csv.mount-spec-path",
        "string",
        default=f"/etc/{_RUNTIME}/host-files-for-container.d",
        doc="Directory of the CSV files of Tegra systems.",
    ),
    Option(
        f"{_MODES}.jit-cdi.driver-capabilities",
        "string",
        default="env",
        doc='"env": a container gets the files for its NVIDIA_DRIVER_CAPABILITIES; '
        '"all": every file of the driver.',
        choices=("env", "all"),
        strict=True,
        acts=True,
    ),
    Option(
        f"{_MODES}.jit-cdi.nvcdi-disable-hooks",
        "list",
        default=[],
        doc='Steps in the container that are left out, by the name of their hook, or "all".',
        choices=HOOKS,
        acts=True,
    ),
    Option(
        f"{_MODES}.jit-cdi.nvcdi-feature-flags",
        "list",
        default=[],
        doc="Feature flags, as for `gpuruntime cdi generate --feature-flag`.",
        choices=FLAGS,
        acts=True,
    ),
    Option(
        f"{_MODES}.legacy.cuda-compat-mode",
        "string",
        default="ldconfig",
        doc="How CUDA's compatibility libraries of an image are put to use: "
        '"ldconfig", "mount", "hook" or "disabled".',
        choices=("disabled", "hook", "ldconfig", "mount"),
        acts=True,
    ),
    Option(
        f"{_RUNTIME}-hook.path",
        "string",
        default="nvidia-container-runtime-hook",
        doc="The prestart hook of the mode legacy, by its absolute path; ours by default.",
        acts=True,
    ),
    Option(
        f"{_RUNTIME}-hook.skip-mode-detection",
        "bool",
        default=False,
        doc="The prestart hook works in every mode, not in legacy only.",
        acts=True,
    ),
    Option(
        "nvidia-ctk.path",
        "string",
        default="nvidia-ctk",
        doc="The program that hooks call, by its absolute path; gpu-cdi-hook by default.",
        acts=True,
    ),
)
BY_KEY = {option.key: option for option in OPTIONS}
TABLES = frozenset(
    ".".join(parts[:length])
    for parts in (option.key.split(".") for option in OPTIONS)
    for length in range(1, len(parts))
)

_HEAD = """\
# gpuruntime: every option. What is commented out shows how, and is not in force.
# Place: /etc/gpuruntime/config.toml, or /etc/nvidia-container-runtime/config.toml.
# A key that is not listed here is a warning, never a failed container.
"""
_REFERENCE_HEAD = """\
# config.toml

<!-- generated from gpuruntime/configfile/option_table.py: PYTHON is .venv/bin/python
PYTHON -c 'from gpuruntime.configfile import option_table as t; print(t.reference(), end="")' -->

The file in force is the first that exists:

1. `$GPURUNTIME_CONFIG`
2. `$NVIDIA_CTK_CONFIG_FILE_PATH`
3. `$XDG_CONFIG_HOME/gpuruntime/config.toml`
4. `$XDG_CONFIG_HOME/nvidia-container-runtime/config.toml`
5. `/etc/gpuruntime/config.toml`
6. `/etc/nvidia-container-runtime/config.toml`

Without one, every option has its default.
`gpuruntime config show` says which file that is, and where each value is from.

| command | what it does |
|---|---|
| `gpuruntime config show` | prints the values in force, with `--json` for programs |
| `gpuruntime config default` | prints a file with every option, as `config.toml.example` |
| `gpuruntime config set KEY=VALUE...` | prints the file changed; `--in-place` writes it |
| `gpuruntime config check` | names everything that is wrong with the file, by line |
| `gpuruntime config compile` | compiles the file for the start path, which reads no TOML |

A key that is not listed is a warning when a container starts, and an error of `config check`.
A value of the wrong type is an error of both.
Items of a list are separated by `:` in `config set`, or by `,` if there is no `:`.
A feature is removed from the file by `nil`.
An option that is *not yet* acted on may be set: `config check` notes it.

| key | type | default | acted on | what for |
|---|---|---|---|---|
"""


def example(overrides: Mapping[str, Value] | None = None) -> str:
    """Return a config file with every option; *overrides* are values in place of the defaults."""
    given = overrides or {}
    blocks = [_HEAD]
    table = ""
    for option in OPTIONS:
        header = "" if option.table == table else f"[{option.table}]\n"
        table = option.table
        value = given.get(option.key, option.default)
        mark = ""
        if option.sample is not None and option.key not in given:
            mark, value = "#", option.sample
        blocks.append(f"{header}# {option.doc}\n{mark}{option.name} = {literal(value)}\n")
    return "\n".join(blocks)


def reference() -> str:
    """Return docs/reference/config.md."""
    rows = (
        f"| `{option.key}` | {'bool, or not set' if option.kind == 'optional' else option.kind} "
        f"| {'not set' if option.default is None else f'`{literal(option.default)}`'} "
        f"| {'yes' if option.acts else 'not yet'} | {option.doc} |\n"
        for option in OPTIONS
    )
    return _REFERENCE_HEAD + "".join(rows)


def literal(value: Value) -> str:
    """Return *value* as TOML."""
    if isinstance(value, list):
        return f"[{', '.join(literal(item) for item in value)}]"
    # What JSON has for a string, TOML has too, but for the one control character it lets through.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def flatten(document: Mapping[str, object]) -> Iterator[tuple[tuple[str, ...], object]]:
    """Give each value of *document* with its path; a known key that is a table is a value too.

    Below a path that is longer than that of any option, a table is a value.
    """
    deepest = max(option.key.count(".") for option in OPTIONS) + 1
    todo: list[tuple[tuple[str, ...], object]] = [((), document)]
    while todo:
        path, value = todo.pop()
        if isinstance(value, Mapping) and len(path) < deepest and to_key(path) not in BY_KEY:
            todo += reversed([((*path, name), item) for name, item in value.items()])
        else:
            yield path, value


def to_key(path: tuple[str, ...]) -> str:
    """Return the dotted key of *path*; a part that needs it is quoted, and no option's."""
    return ".".join(
        part
        if part and all(c.isascii() and (c.isalnum() or c in "-_") for c in part)
        else json.dumps(part)
        for part in path
    )


def nearest(key: str) -> str | None:
    """Return the known key that may be meant by *key*: of the same name, else spelled alike."""
    if len(key) > 200:
        return None
    name = key.rpartition(".")[2]
    same = [option.key for option in OPTIONS if option.name == name]
    near = difflib.get_close_matches(key, same, 1, 0) or difflib.get_close_matches(key, BY_KEY, 1)
    if near:
        return near[0]
    names = {option.name: option.key for option in OPTIONS}
    alike = difflib.get_close_matches(name, names, 1)
    return names[alike[0]] if alike else None
