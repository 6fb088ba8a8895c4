# SPDX-License-Identifier: Apache-2.0
"""Read the request of a container from its OCI config, under the operator's config; pure.

On the start path. An image may request devices by variables, labels and mounts; the operator's
config decides which requests are honoured.
"""

from __future__ import annotations

from cdi import names, pathnames
from gpuruntime import config as settings
from gpuruntime.errors import ConfigError, RequestError
from gpuruntime.record import Record
from gpuruntime.request import driver_options
from gpuruntime.request.container import MOUNT_ROOT, Container, checked, shortened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from cdi.wire import OciConfig
    from gpuruntime.config import Config
    from gpuruntime.request.container import Ignored
    from gpuruntime.request.driver_options import DriverOptions

VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
# Devices of this kind are not looked up in a spec: they are the devices of the machine.
AUTOMATIC_KIND = "runtime.nvidia.com/gpu"
# Every device of the host, for programs that manage them: an image may not request these.
MANAGEMENT_VENDOR = "management.nvidia.com"
OUR_VENDORS = ("nvidia.com", "runtime.nvidia.com", MANAGEMENT_VENDOR)
# Prestart hooks of engines, which would inject a second time.
ENGINE_HOOKS = (
    *("nvidia-container-runtime-hook", "nvidia-container-toolkit"),
    "gpu-container-runtime-hook",
)
# Hooks of CDI specs: a config.json that has one has been edited already.
SPEC_HOOKS = ("gpu-cdi-hook", "nvidia-cdi-hook")
MAX_REQUESTS = 10_000
ANNOTATIONS, MOUNTS, ENVIRONMENT, IMAGE = "annotations", "mounts", "environment", "image"
_ESCAPE = b"\\u00"
_ESCAPED_SLASH = b"\\/"
_WORD = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-./=:")


class Request(Record):
    """The devices that a container requests; false if it requests nothing.

    *mode* is one of config.MODES, resolved, "" without a request. *source* is where the devices
    are requested: ANNOTATIONS, MOUNTS, ENVIRONMENT, or IMAGE for an image of an old CUDA version
    without NVIDIA_VISIBLE_DEVICES. *devices* are names without repeats: qualified names, or in
    mode legacy the names as written. With *driver_only* there are none. *ignored* are the requests
    that are not honoured, and why.
    """

    __slots__ = ("devices", "driver_only", "extras", "ignored", "mode", "source")

    def __init__(
        self,
        mode: str = "",
        source: str = "",
        devices: tuple[str, ...] = (),
        extras: DriverOptions = driver_options.DriverOptions(),  # noqa: B008 (never changed)
        *,
        driver_only: bool = False,
        ignored: tuple[Ignored, ...] = (),
    ) -> None:
        self.mode = mode
        self.source = source
        self.devices = devices
        self.extras = extras
        self.driver_only = driver_only
        self.ignored = ignored

    def __bool__(self) -> bool:
        return bool(self.devices) or self.driver_only

    @property
    def is_automatic(self) -> bool:
        """Whether the devices come from the inventory, not from CDI specs."""
        return _is_automatic(self.mode, self.devices)

    @property
    def ids(self) -> tuple[str, ...]:
        """The names of the devices without their kind."""
        return _ids(self.mode, self.devices)


def triggers(config: Config) -> tuple[bytes, ...] | None:
    """Return byte strings of which every config.json with a request has at least one.

    Return None if there are no such words: the config has an annotation prefix that every
    annotation has, or a name with characters that JSON can spell in more than one way. The
    launcher looks for the same words.
    """
    words = [
        *("NVIDIA_", "CUDA_VERSION", "nvidia.com/", pathnames.basename(MOUNT_ROOT)),
        *ENGINE_HOOKS,
        *SPEC_HOOKS,
        *config.swarm,
        *config.annotation_prefixes,
    ]
    encoded = tuple(dict.fromkeys(word.encode("utf-8", "surrogateescape") for word in words))
    return encoded if all(word and _WORD.issuperset(word) for word in encoded) else None


def may_ask(data: bytes, config: Config) -> bool:
    """Return whether the bytes of a config.json may contain a request; True in case of doubt."""
    words = triggers(config)
    if words is None or any(word in data for word in words) or _ESCAPED_SLASH in data:
        return True
    # A trigger may be spelled with escapes; what Go escapes by habit (<, >, &) is harmless.
    at = data.find(_ESCAPE)
    while at >= 0:
        at += len(_ESCAPE)
        try:
            if int(data[at : at + 2], 16) in _WORD:
                return True
        except ValueError:
            # Not valid JSON.
            return True
        at = data.find(_ESCAPE, at)
    return False


def from_oci(document: OciConfig, config: Config) -> Request:
    """Return the request of *document* under *config*; see `from_container`."""
    return from_container(Container(document, config))


def from_container(container: Container) -> Request:
    """Return the request of *container*: by annotations, else by mounts, else by variables.

    A variable that is unset, empty or `void` requests nothing, `none` only the driver, `all` every
    GPU. Raises RequestError for a request that is malformed or not permitted, and ConfigError if
    there is a request and the configured mode does not exist.
    """
    config = container.config
    source, requested = _requested(container)
    if not requested:
        return Request(ignored=tuple(container.ignored))
    if container.malformed is not None:
        raise RequestError(
            f"invalid environment variable: {container.malformed}",
            "write it as NAME=VALUE",
        )
    mode = _mode(requested, config)
    driver_only = source == ENVIRONMENT and requested == ["none"]
    if mode == settings.CDI and config.default_kind == AUTOMATIC_KIND:
        # Of that kind `none` is a device as well, and no spec has the driver's files.
        driver_only = False
    devices = () if driver_only else _devices(requested, mode, container)
    if _is_automatic(mode, devices):
        ids = _ids(mode, devices)
        extras = driver_options.read(container, ids, unknown_is_error=mode == settings.LEGACY)
    else:
        extras = driver_options.none(container)
    return Request(
        mode, source, devices, extras, driver_only=driver_only, ignored=tuple(container.ignored)
    )


def is_ours(name: str, config: Config) -> bool:
    """Return whether *name*, plain or qualified, is for a device of this program's vendors."""
    if not names.is_qualified(name):
        return True
    kind = name.partition("=")[0]
    return kind == config.default_kind or kind.partition("/")[0] in OUR_VENDORS


def _requested(container: Container) -> tuple[str, list[str]]:
    """Return the source that is honoured and its names, as written there."""
    # An earlier injection has left this word: a second one must not add more.
    injected = "void" in container.words(VISIBLE_DEVICES)
    honoured: tuple[str, list[str]] = "", []
    for source, source_names in (
        (ANNOTATIONS, _from_annotations(container)),
        (MOUNTS, _from_mounts(container)),
        _from_environment(container),
    ):
        requested = source_names
        if injected:
            requested = [name for name in source_names if not is_ours(name, container.config)]
            if len(requested) < len(source_names):
                why = "the devices have been added already"
                container.ignore(_where(source), source_names, why)
        if not requested:
            continue
        if honoured[1]:
            container.ignore(_where(source), requested, f"{honoured[0]} take precedence")
        elif source == MOUNTS and not container.config.accept_mounts:
            container.ignore_mounts(requested)
        elif source == ANNOTATIONS and not _is_for_specs(requested, container.config):
            container.ignore(source, requested, "annotations are honoured in mode cdi only")
        elif source in (ENVIRONMENT, IMAGE) and not container.may_use_variables:
            container.ignore_unprivileged(_where(source), requested)
        else:
            honoured = source, requested
    return honoured


def _where(source: str) -> str:
    return VISIBLE_DEVICES if source in (ENVIRONMENT, IMAGE) else source


def _from_annotations(container: Container) -> list[str]:
    annotations: Any = container.document.get("annotations") or {}
    prefixes = container.config.annotation_prefixes
    if not prefixes or not isinstance(annotations, dict):
        return []
    devices: list[str] = []
    for key in sorted(annotations):
        if key.startswith(prefixes):
            value = annotations[key]
            if not isinstance(value, str):
                raise RequestError(
                    f'the annotation "{shortened(key)}" is not a string',
                    "write its value as a string of device names",
                )
            devices += [name for name in checked(value, key).split(",") if name]
    return devices


def _from_mounts(container: Container) -> list[str]:
    others = container.mount_names(are_bound=False)
    if others:
        container.ignore(MOUNTS, others, "that is not a bind mount")
    devices: dict[str, None] = {}
    for name in container.mount_names():
        kind, _, rest = name.partition("/")
        if kind == "imex":
            # Not a device.
            continue
        device = name
        if kind == "cdi":
            vendor, _, rest = rest.partition("/")
            cls, separator, last = rest.partition("/")
            device = f"{vendor}/{cls}={last}" if separator else f"{vendor}/{rest}"
            if not names.is_qualified(device):
                container.ignore(MOUNTS, [name], "that is not a CDI device name")
                continue
        devices[device] = None
    return list(devices)


def _from_environment(container: Container) -> tuple[str, list[str]]:
    """Return the source and the names that variables request."""
    source = ENVIRONMENT
    swarm = [name for name in container.config.swarm if name in container.environment]
    if swarm:
        requested = [word for name in swarm for word in container.words(name)]
    elif VISIBLE_DEVICES in container.environment:
        requested = container.words(VISIBLE_DEVICES)
    elif container.is_old_image:
        # Images of CUDA before version 8 request every GPU by having no NVIDIA_VISIBLE_DEVICES.
        source, requested = IMAGE, ["all"]
    else:
        requested = []
    if "void" in requested:
        return source, []
    special = next((word for word in requested if word in ("all", "none")), None)
    return source, [special] if special else requested


def _is_for_specs(requested: list[str], config: Config) -> bool:
    """Return whether the names *requested* are looked up in CDI specs."""
    if config.mode == settings.AUTO:
        return all(map(names.is_qualified, requested))
    return config.mode == settings.CDI


def _mode(requested: list[str], config: Config) -> str:
    """Return the mode for the names *requested*; raise ConfigError if it does not exist."""
    mode = config.mode
    if mode == settings.AUTO:
        return settings.CDI if _is_for_specs(requested, config) else settings.JIT
    if mode in settings.MODES:
        return mode
    where = f'"{config.path}": ' if config.path else ""
    raise ConfigError(
        f'{where}the mode "{mode}" is not a mode',
        f"set nvidia-container-runtime.mode to one of {', '.join(settings.MODES)}",
    )


def _devices(requested: list[str], mode: str, container: Container) -> tuple[str, ...]:
    """Return the names *requested* in the form of *mode*; raise RequestError."""
    if len(requested) > MAX_REQUESTS:
        raise RequestError(
            f"{len(requested)} devices are requested", 'name each device once, or use "all"'
        )
    devices = requested
    if mode != settings.LEGACY:
        kind = container.config.default_kind if mode == settings.CDI else AUTOMATIC_KIND
        devices = [name if names.is_qualified(name) else f"{kind}={name}" for name in requested]
    _check_management(devices, container)
    automatic = [name for name in devices if _is_automatic_name(name)]
    if mode != settings.LEGACY and 0 < len(automatic) < len(devices):
        other = next(name for name in devices if not _is_automatic_name(name))
        raise RequestError(
            f'"{shortened(automatic[0])}" cannot be requested together with "{shortened(other)}": '
            "the devices of vendor 'runtime.nvidia.com' are not supported with other CDI devices",
            'use one kind for all devices, such as "nvidia.com/gpu"',
        )
    return tuple(dict.fromkeys(devices))


def _check_management(devices: list[str], container: Container) -> None:
    prefix = f"{MANAGEMENT_VENDOR}/"
    if container.is_privileged or container.config.default_kind.startswith(prefix):
        return
    for name in devices:
        if name.startswith(prefix):
            raise RequestError(
                f'"{shortened(name)}" is for privileged containers only',
                'request devices of "nvidia.com/gpu", or run the container privileged',
            )


def _is_automatic(mode: str, devices: tuple[str, ...]) -> bool:
    if not devices:
        return mode != settings.CDI
    return mode == settings.LEGACY or _is_automatic_name(devices[0])


def _is_automatic_name(name: str) -> bool:
    return name.startswith(f"{AUTOMATIC_KIND}=")


def _ids(mode: str, devices: tuple[str, ...]) -> tuple[str, ...]:
    if mode == settings.LEGACY:
        return devices
    return tuple(name.partition("=")[2] for name in devices)
