# SPDX-License-Identifier: Apache-2.0
"""What a container requests besides devices: driver capabilities, requirements, features; pure.

On the start path. This applies to devices from the inventory; what a CDI spec gives is decided by
its author.
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
DISABLE_REQUIRE = "NVIDIA_DISABLE_REQUIRE"
# Variable → what of the host it adds to the devices; `enabled` is the only value that counts.
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

    *features* are values of FEATURES, *mig* those of MIG: rights over all MIG devices.
    """

    __slots__ = ("capabilities", "features", "imex", "mig", "requirements")

    def __init__(
        self,
        capabilities: tuple[str, ...] = (),
        requirements: tuple[str, ...] = (),
        *,
        imex: tuple[int, ...] = (),
        features: tuple[str, ...] = (),
        mig: tuple[str, ...] = (),
    ) -> None:
        self.capabilities = capabilities
        self.requirements = requirements
        self.imex = imex
        self.features = features
        self.mig = mig


def read(container: Container, ids: tuple[str, ...], *, unknown_is_error: bool) -> DriverOptions:
    """Return what *container* asks for beside the devices *ids*.

    Raises RequestError for what is malformed or not to be had, with *unknown_is_error* a driver
    capability as well, and ConfigError for what is wrong with the config.
    """
    return DriverOptions(
        _capabilities(container, unknown_is_error=unknown_is_error),
        _requirements(container),
        imex=_imex(container),
        features=_features(container),
        mig=_mig(container, ids),
    )


def none(container: Container) -> DriverOptions:
    """Return nothing, noting what *container* asks for in vain."""
    for name in (*FEATURES, *MIG, IMEX_CHANNELS):
        asked = container.words(name)
        if asked and not _NOTHING & set(asked):
            why = "the devices are a CDI spec's: name these by a kind of CDI, too"
            container.ignore(name, asked, why)
    return DriverOptions()


def _capabilities(container: Container, *, unknown_is_error: bool) -> tuple[str, ...]:
    supported = _supported(container.config)
    key = "nvidia-container-runtime.modes.jit-cdi.driver-capabilities"
    if container.config[key] == "all" and not unknown_is_error:
        return supported
    if DRIVER_CAPABILITIES not in container.environment and container.is_old_image:
        return supported
    asked = container.words(DRIVER_CAPABILITIES)
    if "all" in asked:
        return supported
    unknown = [word for word in asked if word not in supported]
    if unknown and unknown_is_error:
        raise RequestError(
            f'unsupported capabilities found in {shown(asked)} (allowed "{",".join(supported)}")',
            f"name only such in {DRIVER_CAPABILITIES}",
        )
    if unknown:
        why = f"no such capability here; there are {', '.join(supported) or 'none'}"
        container.ignore(DRIVER_CAPABILITIES, unknown, why)
    known = [word for word in asked if word in supported]
    return tuple(sorted({*known} or {*capabilities.DEFAULT} & {*supported}))


def _supported(config: Config) -> tuple[str, ...]:
    asked = words(config["supported-driver-capabilities"])
    if "all" in asked:
        return capabilities.ALL
    for word in asked:
        if word not in capabilities.ALL:
            raise ConfigError(
                f'supported-driver-capabilities: "{word}" is no driver capability',
                f"name some of {', '.join(capabilities.ALL)}",
            )
    return tuple(sorted(set(asked)))


def _requirements(container: Container) -> tuple[str, ...]:
    if container.config["disable-require"] or requirements.is_true(
        container.value(DISABLE_REQUIRE)
    ):
        return ()
    found = {
        container.value(name)
        for name in container.environment
        if name.startswith(REQUIRE) and not name.startswith(f"{REQUIRE}JETPACK")
    }
    if container.is_old_image:
        found.add(requirements.of_cuda_version(container.value("CUDA_VERSION")))
    return tuple(sorted(value for value in found if value.strip()))


def _imex(container: Container) -> tuple[int, ...]:
    source = "mounts"
    found = [name[len("imex/") :] for name in container.mount_names() if name.startswith("imex/")]
    if found and not container.config.accept_mounts:
        container.ignore_mounts(f"imex/{name}" for name in found)
        found = []
    if not found:
        source, found = IMEX_CHANNELS, _imex_by_variable(container)
    if found and "ignore-imex-channel-requests" in container.config.features:
        container.ignore(source, found, 'the feature "ignore-imex-channel-requests" is set')
        return ()
    return tuple(dict.fromkeys(channel(name, source) for name in found))


def _imex_by_variable(container: Container) -> list[str]:
    found = container.words(IMEX_CHANNELS)
    if not found or _NOTHING & set(found):
        return []
    if "all" in found:
        # Runtimes have taken the variable of GPUs for this one.
        container.ignore(IMEX_CHANNELS, found, "channels are given by number only")
        return []
    if not container.may_use_variables:
        container.ignore_unprivileged(IMEX_CHANNELS, found)
        return []
    return found


def channel(name: str, source: str) -> int:
    """Return the number of the channel *name*, which *source* asks for; raise RequestError."""
    digits = name.removeprefix("channel")
    if not (0 < len(digits) <= _MAX_DIGITS and _DIGITS.issuperset(digits)):
        raise RequestError(
            f'{source}: invalid channel ID "{shortened(name)}"',
            f"name channels by numbers, as {IMEX_CHANNELS}=0",
        )
    if int(digits) > MAX_IMEX_CHANNEL:
        raise RequestError(
            f'{source}: invalid channel ID "{name}": must be in the range [0, {MAX_IMEX_CHANNEL}]',
            "name a channel of that range",
        )
    return int(digits)


def _features(container: Container) -> tuple[str, ...]:
    found = []
    for variable, feature in FEATURES.items():
        value = container.value(variable)
        if not value:
            continue
        if value != "enabled":
            container.ignore(variable, [value], 'the only value that counts is "enabled"')
        elif not container.may_use_variables:
            container.ignore_unprivileged(variable, [value])
        else:
            found.append(feature)
    return tuple(found)


def _mig(container: Container, ids: tuple[str, ...]) -> tuple[str, ...]:
    found = []
    for variable, right in MIG.items():
        asked = container.words(variable)
        if not asked or _NOTHING & set(asked):
            continue
        if not container.is_privileged:
            raise RequestError(
                f"cannot set {variable[len('NVIDIA_') :]} in non privileged container",
                f"unset {variable}, or run the container privileged",
            )
        if asked != ["all"]:
            raise RequestError(
                f"{variable} names {shown(asked)}, and can be had for all GPUs only",
                f"set {variable}=all",
            )
        if any(map(_is_mig_name, ids)):
            raise RequestError(
                f"{variable} cannot be combined with single MIG devices",
                "ask for GPUs, or unset it",
            )
        found.append(right)
    return tuple(found)


def _is_mig_name(name: str) -> bool:
    gpu, _, mig = name.replace("/", ":").partition(":")
    is_index = bool(gpu and mig) and _DIGITS.issuperset(gpu + mig)
    return is_index or name[:4].upper() == "MIG-"
