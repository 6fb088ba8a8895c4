# SPDX-License-Identifier: Apache-2.0
"""What a container requests besides devices: driver capabilities, requirements, features; pure.

On the start path. This applies to devices from the inventory; for devices of a CDI spec, its
author decides.
"""

from __future__ import annotations

from gpuruntime.errors import ConfigError, RequestError
from gpuruntime.record import Record
from gpuruntime.request import capabilities, requirements
from gpuruntime.request.container import shortened, shown, words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuruntime.config import Config
    from gpuruntime.request.container import Container

DRIVER_CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"
IMEX_CHANNELS = "NVIDIA_IMEX_CHANNELS"
REQUIRE = "NVIDIA_REQUIRE_"
JETPACK = f"{REQUIRE}JETPACK"
_ALL_CSV = "csv-mounts=all"
DISABLE_REQUIRE = "NVIDIA_DISABLE_REQUIRE"
# Variable → the feature that it adds to the devices; its only valid value is `enabled`.
FEATURES = {
    "NVIDIA_GDS": "gds",
    "NVIDIA_MOFED": "mofed",
    "NVIDIA_GDRCOPY": "gdrcopy",
    "NVIDIA_NVSWITCH": "nvswitch",
}
MIG = {"NVIDIA_MIG_CONFIG_DEVICES": "config", "NVIDIA_MIG_MONITOR_DEVICES": "monitor"}
MAX_IMEX_CHANNEL = (1 << 20) - 1
_NOTHING = frozenset({"void", "none"})
_DIGITS = frozenset("0123456789")
_MAX_DIGITS = 9


class DriverOptions(Record):
    """Driver *capabilities*, *requirements* on the host, channels of *imex*, *features*, *mig*.

    *features* are values of FEATURES, *mig* those of MIG: rights over all MIG devices. *all_csv*:
    on a Tegra, what every CSV file lists.
    """

    __slots__ = ("all_csv", "capabilities", "features", "imex", "mig", "requirements")

    def __init__(
        self,
        capabilities: tuple[str, ...] = (),
        requirements: tuple[str, ...] = (),
        *,
        imex: tuple[int, ...] = (),
        features: tuple[str, ...] = (),
        mig: tuple[str, ...] = (),
        all_csv: bool = False,
    ) -> None:
        self.capabilities = capabilities
        self.requirements = requirements
        self.imex = imex
        self.features = features
        self.mig = mig
        self.all_csv = all_csv


def read(container: Container, ids: tuple[str, ...], *, unknown_is_error: bool) -> DriverOptions:
    """Return what *container* requests besides the devices *ids*.

    Raises RequestError for an option that is malformed or not permitted, with *unknown_is_error*
    also for an unknown driver capability, and ConfigError for a fault of the config.
    """
    return DriverOptions(
        _capabilities(container, unknown_is_error=unknown_is_error),
        _requirements(container),
        imex=_imex(container),
        features=_features(container),
        mig=_mig(container, ids),
        all_csv=container.value(JETPACK) == _ALL_CSV,
    )


def none(container: Container) -> DriverOptions:
    """Return no options, and note which requests of *container* are not honoured."""
    for name in (*FEATURES, *MIG, IMEX_CHANNELS):
        words_of_name = container.words(name)
        if words_of_name and not _NOTHING & set(words_of_name):
            why = "the devices come from a CDI spec: request this by a CDI device name as well"
            container.ignore(name, words_of_name, why)
    return DriverOptions()


def _capabilities(container: Container, *, unknown_is_error: bool) -> tuple[str, ...]:
    supported = _supported(container.config)
    key = "nvidia-container-runtime.modes.jit-cdi.driver-capabilities"
    if container.config[key] == "all" and not unknown_is_error:
        return supported
    if DRIVER_CAPABILITIES not in container.environment and container.is_old_image:
        return supported
    requested = container.words(DRIVER_CAPABILITIES)
    if "all" in requested:
        return supported
    unknown = [word for word in requested if word not in supported]
    if unknown and unknown_is_error:
        raise RequestError(
            f"unsupported capabilities found in {shown(requested)} "
            f'(allowed "{",".join(supported)}")',
            f"use only allowed capabilities in {DRIVER_CAPABILITIES}",
        )
    if unknown:
        why = f"not a supported capability; supported are {', '.join(supported) or 'none'}"
        container.ignore(DRIVER_CAPABILITIES, unknown, why)
    accepted = {word for word in requested if word in supported}
    return tuple(sorted(accepted or {*capabilities.DEFAULT} & {*supported}))


def _supported(config: Config) -> tuple[str, ...]:
    supported = words(config["supported-driver-capabilities"])
    if "all" in supported:
        return capabilities.ALL
    for word in supported:
        if word not in capabilities.ALL:
            raise ConfigError(
                f'supported-driver-capabilities: "{word}" is not a driver capability',
                f"use some of {', '.join(capabilities.ALL)}",
            )
    return tuple(sorted(set(supported)))


def _requirements(container: Container) -> tuple[str, ...]:
    if container.config["disable-require"] or requirements.is_true(
        container.value(DISABLE_REQUIRE)
    ):
        return ()
    texts = {
        container.value(name)
        for name in container.environment
        if name.startswith(REQUIRE) and not name.startswith(JETPACK)
    }
    if container.is_old_image:
        texts.add(requirements.of_cuda_version(container.value("CUDA_VERSION")))
    return tuple(sorted(text for text in texts if text.strip()))


def _imex(container: Container) -> tuple[int, ...]:
    source = "mounts"
    channels = [
        name[len("imex/") :] for name in container.mount_names() if name.startswith("imex/")
    ]
    if channels and not container.config.accept_mounts:
        container.ignore_mounts(f"imex/{name}" for name in channels)
        channels = []
    if not channels:
        source, channels = IMEX_CHANNELS, _imex_by_variable(container)
    if channels and "ignore-imex-channel-requests" in container.config.features:
        container.ignore(source, channels, 'the feature "ignore-imex-channel-requests" is set')
        return ()
    return tuple(dict.fromkeys(channel(name, source) for name in channels))


def _imex_by_variable(container: Container) -> list[str]:
    channels = container.words(IMEX_CHANNELS)
    if not channels or _NOTHING & set(channels):
        return []
    if "all" in channels:
        # Some runtimes copy NVIDIA_VISIBLE_DEVICES into this variable.
        container.ignore(IMEX_CHANNELS, channels, "channels are requested by number only")
        return []
    if not container.may_use_variables:
        container.ignore_unprivileged(IMEX_CHANNELS, channels)
        return []
    return channels


def channel(name: str, source: str) -> int:
    """Return the number of the channel *name*, which *source* requests; raise RequestError."""
    digits = name.removeprefix("channel")
    if not (0 < len(digits) <= _MAX_DIGITS and _DIGITS.issuperset(digits)):
        raise RequestError(
            f'{source}: invalid channel ID "{shortened(name)}"',
            f"name channels by their numbers, such as {IMEX_CHANNELS}=0",
        )
    if int(digits) > MAX_IMEX_CHANNEL:
        raise RequestError(
            f'{source}: invalid channel ID "{name}": must be in the range [0, {MAX_IMEX_CHANNEL}]',
            "use a channel in that range",
        )
    return int(digits)


def _features(container: Container) -> tuple[str, ...]:
    features = []
    for variable, feature in FEATURES.items():
        value = container.value(variable)
        if not value:
            continue
        if value != "enabled":
            container.ignore(variable, [value], 'the only valid value is "enabled"')
        elif not container.may_use_variables:
            container.ignore_unprivileged(variable, [value])
        else:
            features.append(feature)
    return tuple(features)


def _mig(container: Container, ids: tuple[str, ...]) -> tuple[str, ...]:
    rights = []
    for variable, right in MIG.items():
        requested = container.words(variable)
        if not requested or _NOTHING & set(requested):
            continue
        if not container.is_privileged:
            raise RequestError(
                f"cannot set {variable[len('NVIDIA_') :]} in non privileged container",
                f"unset {variable}, or run the container privileged",
            )
        if requested != ["all"]:
            raise RequestError(
                f'{variable} names {shown(requested)}, but its only valid value is "all"',
                f"set {variable}=all",
            )
        if any(map(_is_mig_name, ids)):
            raise RequestError(
                f"{variable} cannot be combined with single MIG devices",
                "request whole GPUs, or unset the variable",
            )
        rights.append(right)
    return tuple(rights)


def _is_mig_name(name: str) -> bool:
    gpu, _, mig = name.replace("/", ":").partition(":")
    is_index = bool(gpu and mig) and _DIGITS.issuperset(gpu + mig)
    return is_index or name[:4].upper() == "MIG-"
