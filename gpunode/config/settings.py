# SPDX-License-Identifier: Apache-2.0
"""The settings of the device plugin as a table: option, variables, key of the file, default.

The command line, the reader of values and the documentation use this table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gpuruntime.errors import ArgumentError

# Kinds of values.
BOOLEAN, STRING, PATH, WORD, WORDS, INTEGERS, DURATION = (
    *("boolean", "string", "path", "word", "words", "integers", "duration"),
)
_BOOLEANS = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), False),
}
_DURATION = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,9})?(?:ns|us|ms|s|m|h))+\Z")
_PART = re.compile(r"([0-9.]+)(ns|us|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_EXPECTED = {
    BOOLEAN: "true or false",
    PATH: "an absolute path",
    INTEGERS: "whole numbers separated by commas",
    DURATION: "a duration such as 10m",
}

AUTO = "auto"
ENVVAR, VOLUME_MOUNTS, CDI_ANNOTATIONS, CDI_CRI = (
    *("envvar", "volume-mounts", "cdi-annotations", "cdi-cri"),
)
LIST_STRATEGIES = (ENVVAR, VOLUME_MOUNTS, CDI_ANNOTATIONS, CDI_CRI)
NONE, SINGLE, MIXED = "none", "single", "mixed"
UUID, INDEX = "uuid", "index"
DISTRIBUTED, PACKED = "distributed", "packed"
NVML, TEGRA = "nvml", "tegra"
KUBELET_SOCKET = "/var/lib/kubelet/device-plugins/kubelet.sock"
CDI_ANNOTATION_PREFIX = "cdi.k8s.io/"
CDI_SPEC_DIR = "/var/run/cdi"


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting: the *option* without dashes, its *key* in the config file, "" if it has none.

    *second_variable* sets the option too, after the variable of its own name. *may_be_empty*: an
    empty variable sets the empty value.
    """

    option: str
    kind: str
    default: Any
    help: str
    key: str = ""
    choices: tuple[str, ...] = ()
    second_variable: str = ""
    may_be_empty: bool = False

    @property
    def path(self) -> tuple[str, ...]:
        """The path of the key in the config file."""
        return tuple(self.key.split(".")) if self.key else ()

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables that set the option, the first takes precedence."""
        own = self.option.replace("-", "_").upper()
        return (own, self.second_variable) if self.second_variable else (own,)

    @property
    def name(self) -> str:
        """The name of the setting in programs."""
        return self.option.replace("-", "_")

    def parse(self, text: str, origin: str) -> Any:  # noqa: ANN401 (by the kind)
        """Return the value of *text*, which *origin* has set; raise ArgumentError."""
        value = _parse(self.kind, text)
        words = value if isinstance(value, tuple) else (value,)
        if value is None or (self.choices and any(word not in self.choices for word in words)):
            expected = _EXPECTED.get(self.kind) or f"one of {', '.join(self.choices)}"
            raise ArgumentError(f'{origin} is "{text}", not {expected}', f"use {expected}")
        return value


def _parse(kind: str, text: str) -> Any:  # noqa: ANN401 (by the kind)
    """Return the value of *text* by *kind*, None if it is not of that kind."""
    if kind == BOOLEAN:
        return _BOOLEANS.get(text)
    if kind == PATH:
        return text if text.startswith("/") and "\0" not in text else None
    if kind == WORDS:
        return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if kind == INTEGERS:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        is_valid = all(re.fullmatch("[0-9]{1,9}", part) for part in parts)
        return tuple(map(int, parts)) if is_valid else None
    return duration(text) if kind == DURATION else text


def duration(value: str | int) -> float | None:
    """Return the seconds of *value*, such as "1m30s" or nanoseconds; None if it is neither."""
    if isinstance(value, int):
        return value * 1e-9
    if value == "0":
        return 0.0
    if not _DURATION.match(value):
        return None
    return float(sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(value)))


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "mig-strategy",
        WORD,
        NONE,
        "How MIG devices are offered: none, single or mixed.",
        key="flags.migStrategy",
        choices=(NONE, SINGLE, MIXED),
    ),
    Setting(
        "fail-on-init-error",
        BOOLEAN,
        default=True,
        help="Exit if the driver does not answer at start; false: wait for it.",
        key="flags.failOnInitError",
    ),
    Setting(
        "device-list-strategy",
        WORDS,
        (ENVVAR,),
        f"How a container gets its devices: {', '.join(LIST_STRATEGIES)}, several of them, or "
        "auto: what the engine of this node supports.",
        key="flags.plugin.deviceListStrategy",
        choices=(AUTO, *LIST_STRATEGIES),
    ),
    Setting(
        "device-id-strategy",
        WORD,
        UUID,
        "How the devices of a container are named: uuid or index.",
        key="flags.plugin.deviceIDStrategy",
        choices=(UUID, INDEX),
    ),
    Setting(
        "pass-device-specs",
        BOOLEAN,
        default=False,
        help="Also pass the device nodes to the engine.",
        key="flags.plugin.passDeviceSpecs",
    ),
    Setting(
        "nvidia-driver-root",
        PATH,
        "/",
        "Directory of the host below which the driver is installed.",
        key="flags.nvidiaDriverRoot",
    ),
    Setting(
        "nvidia-dev-root",
        PATH,
        None,
        'Directory of the host whose "dev" holds the device nodes.  [default: the driver root]',
        key="flags.nvidiaDevRoot",
    ),
    Setting(
        "container-driver-root",
        PATH,
        None,
        "The driver root in the file system of this program.  "
        "[default: /driver-root if it exists, else the driver root]",
        key="flags.plugin.containerDriverRoot",
        second_variable="DRIVER_ROOT_CTR_PATH",
    ),
    Setting(
        "cdi-annotation-prefix",
        STRING,
        CDI_ANNOTATION_PREFIX,
        "Prefix of the annotations of the strategy cdi-annotations.",
        key="flags.plugin.cdiAnnotationPrefix",
    ),
    Setting(
        "nvidia-cdi-hook-path",
        STRING,
        None,
        "Path of gpu-cdi-hook on the host, for CDI specs.  [default: the installed one]",
        key="flags.plugin.nvidiaCTKPath",
        second_variable="NVIDIA_CTK_PATH",
    ),
    Setting("cdi-feature-flags", WORDS, (), "Feature flags of the generated CDI specs."),
    Setting(
        "cdi-disable-hooks",
        WORDS,
        (),
        "Hooks that the generated CDI specs leave out, or all.",
    ),
    Setting(
        "gdrcopy-enabled",
        BOOLEAN,
        default=False,
        help="Give containers the device nodes of GDRCopy.",
        key="flags.gdrcopyEnabled",
    ),
    Setting(
        "gds-enabled",
        BOOLEAN,
        default=False,
        help="Give containers the device nodes of GPUDirect Storage.",
        key="flags.gdsEnabled",
    ),
    Setting(
        "mofed-enabled",
        BOOLEAN,
        default=False,
        help="Give containers the device nodes of Mellanox OFED.",
        key="flags.mofedEnabled",
    ),
    Setting(
        "mps-root",
        STRING,
        "",
        "Directory of the host with the files of the MPS control daemons.",
        key="flags.mpsRoot",
    ),
    Setting(
        "shared-devices-allocation-policy",
        WORD,
        DISTRIBUTED,
        "Which units of shared GPUs are preferred: distributed or packed.",
        key="flags.plugin.sharedDevicesAllocationPolicy",
        choices=(DISTRIBUTED, PACKED),
    ),
    Setting(
        "device-discovery-strategy",
        WORD,
        AUTO,
        "How devices are discovered: nvml, or auto, which is nvml.",
        key="flags.deviceDiscoveryStrategy",
        choices=(AUTO, NVML, TEGRA),
    ),
    Setting(
        "imex-channel-ids",
        INTEGERS,
        (),
        "IMEX channels of each container: 0, or none.",
        key="imex.channelIDs",
    ),
    Setting(
        "imex-required",
        BOOLEAN,
        default=False,
        help="Refuse an allocation if an IMEX channel is missing.",
        key="imex.required",
    ),
    Setting(
        "kubelet-socket",
        STRING,
        KUBELET_SOCKET,
        "Socket of the kubelet; the sockets of the plugin are in its directory.  "
        "Empty: serve, but never register.",
        may_be_empty=True,
    ),
    Setting(
        "cri-socket",
        STRING,
        "",
        "CRI socket of the engine, which is asked what it supports.  "
        "[default: the first usual one that exists]",
    ),
    Setting("cdi-spec-dir", PATH, CDI_SPEC_DIR, "Directory of the CDI specs of the plugin."),
    Setting(
        "health-quiet-time",
        DURATION,
        600.0,
        "How long a GPU must have had no fault until it is healthy again, such as 10m.",
        key="flags.plugin.healthQuietTime",
    ),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}
