# SPDX-License-Identifier: Apache-2.0
"""The table of the options of config.toml: key, type, default, purpose; and texts made from it.

Pure. The start path does not load it: gpuruntime/config.py has the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping

from cdi import strictjson
from gpuruntime import config as settings
from gpuruntime.plan import gpu_edits
from gpuruntime.record import Record
from gpuruntime.request import capabilities

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

Value = str | int | bool | list[str] | None


class Option(Record):
    """One key of config.toml.

    *kind* is a key of KINDS. *choices* are the allowed values, or of a list the allowed items.
    *maximum* is the largest value of an integer that has an effect. *sample* is the value that the
    example shows, commented out, where the default would show nothing. *never* is the reason why
    no program of ours acts on the key, which exists for the incumbent's config files.
    """

    __slots__ = ("choices", "default", "doc", "key", "kind", "maximum", "never", "sample")

    def __init__(
        self,
        key: str,
        kind: str,
        default: Value,
        doc: str,
        *,
        sample: Value = None,
        choices: tuple[str, ...] = (),
        maximum: int = 0,
        never: str = "",
    ) -> None:
        self.key = key
        self.kind = kind
        self.default = default
        self.doc = doc
        self.sample = sample
        self.choices = choices
        self.maximum = maximum
        self.never = never

    @property
    def table(self) -> str:
        """Return the name of the table that the key is in, "" for the root."""
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        """Return the last part of the key."""
        return self.key.rpartition(".")[2]


# Kind → the words for it in a message.
KINDS = {
    "bool": "true or false",
    "optional": "true or false",
    "integer": "a whole number above 0",
    "string": "a string",
    "list": "a list of strings",
}
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
        doc="Whether containers may request GPUs by mounts of /dev/null below "
        "/var/run/nvidia-container-devices.",
        sample=False,
    ),
    Option(
        f"{_ACCEPT}-envvar-when-unprivileged",
        "bool",
        default=True,
        doc="Whether containers without CAP_SYS_ADMIN may request GPUs by environment variables.",
        sample=True,
    ),
    Option(
        "disable-require",
        "bool",
        default=False,
        doc="Whether the requirements of images on the host, in NVIDIA_REQUIRE_* variables, are "
        "ignored.",
    ),
    Option(
        "discovery-timeout",
        "integer",
        default=30,
        doc="Seconds to wait for the driver's answer when the GPUs are discovered.",
    ),
    Option(
        "health",
        "string",
        default="",
        doc='"nvml": ask the driver at each start of a container whether the GPUs still work; '
        '"": only check that their files exist.',
        choices=("", "nvml"),
    ),
    Option(
        "hook-deadline",
        "integer",
        default=10,
        doc="Seconds, from 1 to 600, that a hook may take to work in a container's root. Hooks "
        "of generated CDI specs get the value as their argument --deadline.",
        maximum=gpu_edits.MAX_HOOK_DEADLINE_S,
    ),
    Option(
        "ldconfig-mode",
        "string",
        default="merge",
        doc='How the loader cache of a container learns the driver\'s libraries: "merge" adds '
        'them without running a program; "host" also runs the host\'s ldconfig, confined, where '
        'the merge is not possible; "none" leaves the cache unchanged.',
        choices=("merge", "host", "none"),
    ),
    Option(
        "missing-gpu",
        "string",
        default="error",
        doc='What happens if a requested GPU does not exist or does not work: "error" fails the '
        'container, "warn" starts the container without the GPU.',
        choices=("error", "warn"),
    ),
    Option(
        "supported-driver-capabilities",
        "string",
        default=",".join(capabilities.ALL),
        doc="Driver capabilities that containers may request, separated by commas. The value "
        '"all" in an image stands for these.',
    ),
    Option(
        "swarm-resource",
        "string",
        default="",
        doc="Environment variables, separated by commas, that replace NVIDIA_VISIBLE_DEVICES.",
        sample="DOCKER_RESOURCE_GPU",
    ),
    Option(
        "features.allow-cuda-compat-libs-from-container",
        "optional",
        default=None,
        doc='Treat an unknown value of modes.legacy.cuda-compat-mode as "ldconfig" instead of '
        '"disabled".',
        sample=True,
    ),
    Option(
        "features.allow-ldconfig-from-container",
        "optional",
        default=None,
        doc='Allow a path without "@" in nvidia-container-cli.ldconfig, which means a path in '
        "the container.",
        sample=True,
    ),
    Option(
        "features.allow-unknown-oci-spec-fields",
        "optional",
        default=None,
        doc="Accept members of config.json that the runtime does not know.",
        never="unknown members of config.json are always accepted and kept",
        sample=True,
    ),
    Option(
        "features.disable-cuda-compat-lib-hook",
        "optional",
        default=None,
        doc="Never use the CUDA compatibility libraries of an image.",
        sample=True,
    ),
    Option(
        "features.disable-imex-channel-creation",
        "optional",
        default=None,
        doc="Do not create device nodes of IMEX channels.",
        never="no program creates IMEX channels: a container gets a channel only if the channel "
        "exists",
        sample=True,
    ),
    Option(
        "features.ignore-imex-channel-requests",
        "optional",
        default=None,
        doc="Ignore all requests of containers for IMEX channels.",
        sample=True,
    ),
    Option(
        "features.no-additional-gids-for-device-nodes",
        "optional",
        default=None,
        doc="Do not add the groups of device nodes to the container's process.",
        sample=True,
    ),
    Option(
        f"{_CLI}.debug",
        "string",
        default="",
        doc="File to which the prestart hook appends a log of each step; no log by default. The "
        "file is opened on the host without following a link.",
        sample="/var/log/nvidia-container-toolkit.log",
    ),
    Option(
        f"{_CLI}.environment",
        "list",
        default=[],
        doc='Environment variables for nvidia-container-cli, as "NAME=VALUE".',
        never="the hooks start no program with variables, and read none themselves",
    ),
    Option(
        f"{_CLI}.ldcache",
        "string",
        default="",
        doc="Loader cache in which the driver's libraries are searched.",
        never="the libraries are searched with the loader files of the driver root itself, and "
        "in the directories of the distributions; another cache describes another root",
        sample="/etc/ld.so.cache",
    ),
    Option(
        f"{_CLI}.ldconfig",
        "string",
        default="@/sbin/ldconfig",
        doc='Path of the host\'s ldconfig, after "@"; run only with ldconfig-mode = "host".',
    ),
    Option(
        f"{_CLI}.load-kmods",
        "bool",
        default=True,
        doc="Load the driver's modules and create its device nodes if a node is missing.",
    ),
    Option(
        f"{_CLI}.no-cgroups",
        "bool",
        default=False,
        doc="Forbid the prestart hook to allow devices in the container's cgroup: a container to "
        "which our runtime has not given its devices is then refused.",
        sample=False,
    ),
    Option(
        f"{_CLI}.no-pivot",
        "bool",
        default=False,
        doc="Do not use pivot_root(2).",
        never="the hooks never use pivot_root(2): they reach the container's root through file "
        "descriptors",
        sample=True,
    ),
    Option(
        f"{_CLI}.path",
        "string",
        default="",
        doc="Path of the program nvidia-container-cli.",
        never="the hooks do the work themselves and never run nvidia-container-cli",
        sample="/usr/bin/nvidia-container-cli",
    ),
    Option(
        f"{_CLI}.root",
        "string",
        default="",
        doc="Driver root: the directory below which the driver is installed; / by default.",
        sample="/run/nvidia/driver",
    ),
    Option(
        f"{_CLI}.user",
        "string",
        default="",
        doc="User and group as which nvidia-container-cli queries the driver.",
        never="the driver is queried as the caller of the runtime, because the query may have to "
        "create missing device nodes",
        sample="root:video",
    ),
    Option(
        f"{_RUNTIME}.debug",
        "string",
        default="/dev/null",
        doc="File to which the runtime appends its records, in addition to the engine's log; "
        "/dev/null by default.",
        sample="/var/log/nvidia-container-runtime.log",
    ),
    Option(
        f"{_RUNTIME}.log-level",
        "string",
        default="info",
        doc='Lowest level of the records: "error", "warning", "info" or "debug". With "debug", '
        "each edit of a container is one record.",
        choices=tuple(settings.LOG_LEVELS),
    ),
    Option(
        f"{_RUNTIME}.mode",
        "string",
        default="auto",
        doc='Where the devices of a container come from: "cdi" from the CDI specs in spec-dirs; '
        '"jit-cdi" from the current state of the host; "csv" also from there, by the CSV files of '
        'a Tegra; "legacy" also from there, but a prestart hook mounts the driver\'s files. '
        '"auto" is "cdi" for qualified CDI names and "jit-cdi" for other names.',
        choices=settings.MODES,
    ),
    Option(
        f"{_RUNTIME}.runtimes",
        "list",
        default=["runc", "crun"],
        doc="Low-level runtimes; the first that exists is used. A name is searched in PATH.",
    ),
    Option(
        f"{_MODES}.cdi.annotation-prefixes",
        "list",
        default=["cdi.k8s.io/"],
        doc="Annotations whose key starts with one of these prefixes request devices.",
    ),
    Option(
        f"{_MODES}.cdi.default-kind",
        "string",
        default="nvidia.com/gpu",
        doc="CDI kind of a device that a container names without a kind: "
        "NVIDIA_VISIBLE_DEVICES=0 is nvidia.com/gpu=0.",
    ),
    Option(
        f"{_MODES}.cdi.spec-dirs",
        "list",
        default=["/etc/cdi", "/var/run/cdi"],
        doc="Directories of CDI specs. A later directory takes precedence over an earlier one.",
    ),
    Option(
        f"{_MODES}.csv.compat-container-root",
        "string",
        default="",
        doc="Directory of the CUDA compatibility libraries in images for Orin.",
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
        doc='"env": a container gets the driver files for its NVIDIA_DRIVER_CAPABILITIES; "all": '
        "every container gets all driver files.",
        choices=("env", "all"),
    ),
    Option(
        f"{_MODES}.jit-cdi.nvcdi-disable-hooks",
        "list",
        default=[],
        doc='Steps in the container that are omitted, by the name of their hook, or "all".',
        choices=HOOKS,
    ),
    Option(
        f"{_MODES}.jit-cdi.nvcdi-feature-flags",
        "list",
        default=[],
        doc="Feature flags, as for `gpuruntime cdi generate --feature-flag`.",
        choices=FLAGS,
    ),
    Option(
        f"{_MODES}.legacy.cuda-compat-mode",
        "string",
        default="ldconfig",
        doc='How the CUDA compatibility libraries of an image are used: "ldconfig", "mount", '
        '"hook" or "disabled".',
        choices=("disabled", "hook", "ldconfig", "mount"),
    ),
    Option(
        f"{_RUNTIME}-hook.path",
        "string",
        default="nvidia-container-runtime-hook",
        doc="Absolute path of the prestart hook of the mode legacy; our own hook by default.",
    ),
    Option(
        f"{_RUNTIME}-hook.skip-mode-detection",
        "bool",
        default=False,
        doc="Whether the prestart hook works in every mode instead of the mode legacy only.",
    ),
    Option(
        "nvidia-ctk.path",
        "string",
        default="nvidia-ctk",
        doc="Absolute path of the program that hooks call; gpu-cdi-hook by default.",
    ),
)
BY_KEY = {option.key: option for option in OPTIONS}
TABLES = frozenset(
    ".".join(parts[:length])
    for parts in (option.key.split(".") for option in OPTIONS)
    for length in range(1, len(parts))
)

_HEAD = """\
# All options of gpuruntime. An option that is commented out is an example and not in force.
# Location: /etc/gpuruntime/config.toml, or /etc/nvidia-container-runtime/config.toml.
# A key that is not listed here causes a warning, never a failed container.
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

Without a file, every option has its default.
`gpuruntime config show` prints the file in force, and the origin of each value.

| command | effect |
|---|---|
| `gpuruntime config` | prints the file in force, or the defaults where no file exists |
| `gpuruntime config show` | prints the values in force; `--json` for programs |
| `gpuruntime config default` | prints a file with every option, such as `config.toml.example` |
| `gpuruntime config set KEY=VALUE...` | prints the changed file; `--in-place` writes the file |
| `gpuruntime config check` | lists every fault of the file, with its line |
| `gpuruntime config compile` | compiles the file for the start path, which reads no TOML |

`config set` separates the items of a list at `:`, or at `,` if the value has no `:`.
The value `nil` removes a feature from the file.

## Faults

`config check`, `doctor` and `config set` judge a value by the same function.

| severity | which faults | start of a container |
|---|---|---|
| error | invalid TOML, a wrong type, a value that is not allowed | fails |
| error | an unknown mode or driver capability | fails if the container requests a GPU |
| warning | an unknown key; `hook-deadline = 9999` (600 is used), an unknown log level | succeeds |
| note | a key, or a word in a list, that has no effect | succeeds |

`config check` exits with 1 if there is an error or a warning.
`config set` refuses a value with an error or a warning: it names the allowed values, changes
nothing, and exits with 2.

## Options

Some keys exist only for the incumbent's files: the last column says why no program acts on them.

| key | type | default | meaning | never acted on, because |
|---|---|---|---|---|
"""


def example(overrides: Mapping[str, Value] | None = None) -> str:
    """Return a config file with every option; *overrides* are values in place of the defaults."""
    values = overrides or {}
    blocks = [_HEAD]
    table = ""
    for option in OPTIONS:
        header = "" if option.table == table else f"[{option.table}]\n"
        table = option.table
        value = values.get(option.key, option.default)
        mark = ""
        if option.sample is not None and option.key not in values:
            mark, value = "#", option.sample
        note = f"# No effect: {option.never}.\n" if option.never else ""
        setting = f"{mark}{option.name} = {literal(value)}\n"
        blocks.append(f"{header}# {option.doc}\n{note}{setting}")
    return "\n".join(blocks)


def reference() -> str:
    """Return docs/reference/config.md."""
    rows = (
        f"| `{option.key}` | {'bool, or not set' if option.kind == 'optional' else option.kind} "
        f"| {'not set' if option.default is None else f'`{literal(option.default)}`'} "
        f"| {option.doc} | {option.never} |\n"
        for option in OPTIONS
    )
    return _REFERENCE_HEAD + "".join(rows)


def literal(value: Value) -> str:
    """Return *value* as TOML."""
    if isinstance(value, list):
        return f"[{', '.join(literal(item) for item in value)}]"
    # Each JSON string is a TOML string, except for DEL, which JSON does not escape.
    return strictjson.dumps(value, ascii_only=False).replace("\x7f", "\\u007f")


def flatten(document: Mapping[str, object]) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield each value of *document* with its path.

    A table is a value if it is at the key of an option, or deeper than every option.
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
    """Return the dotted key of *path*; a part with characters that no key has is quoted."""
    return ".".join(
        part
        if part and all(c.isascii() and (c.isalnum() or c in "-_") for c in part)
        else strictjson.dumps(part)
        for part in path
    )


def nearest(key: str) -> str | None:
    """Return the known key most similar to *key*, with the same last part if possible, or None."""
    if len(key) > 200:
        return None
    import difflib  # noqa: PLC0415 (few files have an unknown key)

    name = key.rpartition(".")[2]
    same = [option.key for option in OPTIONS if option.name == name]
    near = difflib.get_close_matches(key, same, 1, 0) or difflib.get_close_matches(key, BY_KEY, 1)
    if near:
        return near[0]
    names = {option.name: option.key for option in OPTIONS}
    alike = difflib.get_close_matches(name, names, 1)
    return names[alike[0]] if alike else None
