# SPDX-License-Identifier: Apache-2.0
"""Read the request of a container from its OCI config, under the operator's config; pure.

On the start path. The image may ask, by variables, labels and mounts; only the operator grants.
"""

from __future__ import annotations

import posixpath

from cdi import names
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
# Devices of this kind are not looked up in a spec: they are those that the machine has now.
AUTOMATIC_KIND = "runtime.nvidia.com/gpu"
# Every device of the host, for who looks after them: not what an image may ask for by itself.
MANAGEMENT_VENDOR = "management.nvidia.com"
OUR_VENDORS = ("nvidia.com", "runtime.nvidia.com", MANAGEMENT_VENDOR)
# Prestart hooks that would inject a second time, where an engine has added one.
ENGINE_HOOKS = (
    *("nvidia-container-runtime-hook", "nvidia-container-toolkit"),
    "gpu-container-runtime-hook",
)
# Hooks of specs. Where one is, somebody has injected, and asked for by which name does not matter.
SPEC_HOOKS = ("gpu-cdi-hook", "nvidia-cdi-hook")
MAX_REQUESTS = 10_000
ANNOTATIONS, MOUNTS, ENVIRONMENT, IMAGE = "annotations", "mounts", "environment", "image"
_ESCAPE = b"\\u00"
_ESCAPED_SLASH = b"\\/"
_WORD = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-./=:")


class Request(Record):
    """What a container is to get; false if that is nothing.

    *mode* is one of config.MODES, resolved, "" without a request. *source* says where the devices
    are asked for: ANNOTATIONS, MOUNTS, ENVIRONMENT, or IMAGE, one of an old CUDA, by having no
    variable of ours. *devices* are names, each once: qualified ones, or in the legacy mode as
    asked. With *driver_only* there are none. *ignored* is what does not count, and why.
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
        """Whether the devices are those that the machine has now, rather than a spec's."""
        return _is_automatic(self.mode, self.devices)

    @property
    def ids(self) -> tuple[str, ...]:
        """The devices, without a kind."""
        return _ids(self.mode, self.devices)


def triggers(config: Config) -> tuple[bytes, ...] | None:
    """Return byte strings without any of which a config.json asks for nothing.

    None if no list can tell: a prefix that every annotation has, or a name of the operator's with
    characters that JSON has more than one spelling of. The launcher looks for the same words.
    """
    words = [
        *("NVIDIA_", "CUDA_VERSION", "nvidia.com/", posixpath.basename(MOUNT_ROOT)),
        *ENGINE_HOOKS,
        *SPEC_HOOKS,
        *config.swarm,
        *config.annotation_prefixes,
    ]
    found = tuple(dict.fromkeys(word.encode("utf-8", "surrogateescape") for word in words))
    return found if all(word and _WORD.issuperset(word) for word in found) else None


def may_ask(data: bytes, config: Config) -> bool:
    """Return whether the bytes of a config.json may contain a request; errs towards True."""
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
            # No JSON.
            return True
        at = data.find(_ESCAPE, at)
    return False


def from_oci(document: OciConfig, config: Config) -> Request:
    """Return the request of *document* under *config*; see `from_container`."""
    return from_container(Container(document, config))


def from_container(container: Container) -> Request:
    """Return the request of *container*: by annotations, else by mounts, else by variables.

    Of variables, unset, empty and `void` ask for nothing, `none` for the driver alone, `all` for
    every GPU. Raises RequestError for what cannot be read, or is not to be had by asking, and
    ConfigError if there is a request and no such mode.
    """
    config = container.config
    source, asked = _asked(container)
    if not asked:
        return Request(ignored=tuple(container.ignored))
    if container.malformed is not None:
        raise RequestError(
            f"invalid environment variable: {container.malformed}",
            "write it as NAME=VALUE",
        )
    mode = _mode(asked, config)
    driver_only = source == ENVIRONMENT and asked == ["none"]
    if mode == settings.CDI and config.default_kind == AUTOMATIC_KIND:
        # Of that kind `none` is a device as well, and there is no spec to take the driver from.
        driver_only = False
    devices = () if driver_only else _devices(asked, mode, container)
    if _is_automatic(mode, devices):
        ids = _ids(mode, devices)
        more = driver_options.read(container, ids, unknown_is_error=mode == settings.LEGACY)
    else:
        more = driver_options.none(container)
    return Request(
        mode, source, devices, more, driver_only=driver_only, ignored=tuple(container.ignored)
    )


def is_ours(name: str, config: Config) -> bool:
    """Return whether *name*, plain or qualified, is one that this program gives devices for."""
    if not names.is_qualified(name):
        return True
    kind = name.partition("=")[0]
    return kind == config.default_kind or kind.partition("/")[0] in OUR_VENDORS


def _asked(container: Container) -> tuple[str, list[str]]:
    """Return the source that counts and the names that it has, as they are written there."""
    # Whoever injected already has left this: asking twice must not give more.
    injected = "void" in container.words(VISIBLE_DEVICES)
    counts: tuple[str, list[str]] = "", []
    for source, found in (
        (ANNOTATIONS, _from_annotations(container)),
        (MOUNTS, _from_mounts(container)),
        _from_environment(container),
    ):
        asked = found
        if injected:
            asked = [name for name in found if not is_ours(name, container.config)]
            if len(asked) < len(found):
                container.ignore(_where(source), found, "the devices have been added already")
        if not asked:
            continue
        if counts[1]:
            container.ignore(_where(source), asked, f"{counts[0]} go before it")
        elif source == MOUNTS and not container.config.accept_mounts:
            container.ignore_mounts(asked)
        elif source == ANNOTATIONS and not _is_for_specs(asked, container.config):
            container.ignore(source, asked, "annotations count in the mode cdi only")
        elif source in (ENVIRONMENT, IMAGE) and not container.may_use_variables:
            container.ignore_unprivileged(_where(source), asked)
        else:
            counts = source, asked
    return counts


def _where(source: str) -> str:
    return VISIBLE_DEVICES if source in (ENVIRONMENT, IMAGE) else source


def _from_annotations(container: Container) -> list[str]:
    annotations: Any = container.document.get("annotations") or {}
    prefixes = container.config.annotation_prefixes
    if not prefixes or not isinstance(annotations, dict):
        return []
    found: list[str] = []
    for key in sorted(annotations):
        if key.startswith(prefixes):
            value = annotations[key]
            if not isinstance(value, str):
                raise RequestError(
                    f'the annotation "{shortened(key)}" is not a string', "give it names"
                )
            found += [name for name in checked(value, key).split(",") if name]
    return found


def _from_mounts(container: Container) -> list[str]:
    others = container.mount_names(are_bound=False)
    if others:
        container.ignore(MOUNTS, others, "that is no bind mount")
    found: dict[str, None] = {}
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
                container.ignore(MOUNTS, [name], "that is no name of CDI")
                continue
        found[device] = None
    return list(found)


def _from_environment(container: Container) -> tuple[str, list[str]]:
    """Return the source and the names that variables ask for."""
    source = ENVIRONMENT
    swarm = [name for name in container.config.swarm if name in container.environment]
    if swarm:
        asked = [word for name in swarm for word in container.words(name)]
    elif VISIBLE_DEVICES in container.environment:
        asked = container.words(VISIBLE_DEVICES)
    elif container.is_old_image:
        # Images of CUDA before 8 ask for every GPU by having no variable of ours.
        source, asked = IMAGE, ["all"]
    else:
        asked = []
    if "void" in asked:
        return source, []
    special = next((word for word in asked if word in ("all", "none")), None)
    return source, [special] if special else asked


def _is_for_specs(asked: list[str], config: Config) -> bool:
    """Return whether the names *asked* are looked up in CDI specs."""
    if config.mode == settings.AUTO:
        return all(map(names.is_qualified, asked))
    return config.mode == settings.CDI


def _mode(asked: list[str], config: Config) -> str:
    """Return the mode for the names *asked*; raise ConfigError if there is none."""
    mode = config.mode
    if mode == settings.AUTO:
        return settings.CDI if _is_for_specs(asked, config) else settings.JIT
    if mode in settings.MODES:
        return mode
    what = "not there yet" if mode == "csv" else "not a mode"
    where = f'"{config.path}": ' if config.path else ""
    raise ConfigError(
        f'{where}the mode "{mode}" is {what}',
        f"set nvidia-container-runtime.mode to one of {', '.join(settings.MODES)}",
    )


def _devices(asked: list[str], mode: str, container: Container) -> tuple[str, ...]:
    """Return the names of *asked* as *mode* has them; raise RequestError."""
    if len(asked) > MAX_REQUESTS:
        raise RequestError(f"{len(asked)} devices are asked for", "name the devices once, or all")
    found = asked
    if mode != settings.LEGACY:
        kind = container.config.default_kind if mode == settings.CDI else AUTOMATIC_KIND
        found = [name if names.is_qualified(name) else f"{kind}={name}" for name in asked]
    _check_management(found, container)
    automatic = [name for name in found if _is_automatic_name(name)]
    if mode != settings.LEGACY and 0 < len(automatic) < len(found):
        other = next(name for name in found if not _is_automatic_name(name))
        raise RequestError(
            f'"{shortened(automatic[0])}" cannot be had beside "{shortened(other)}": the devices '
            "of vendor 'runtime.nvidia.com' are not supported with other CDI devices",
            'name all devices by one kind, as "nvidia.com/gpu"',
        )
    return tuple(dict.fromkeys(found))


def _check_management(found: list[str], container: Container) -> None:
    prefix = f"{MANAGEMENT_VENDOR}/"
    if container.is_privileged or container.config.default_kind.startswith(prefix):
        return
    for name in found:
        if name.startswith(prefix):
            raise RequestError(
                f'"{shortened(name)}" is for privileged containers',
                'ask for devices of "nvidia.com/gpu", or run the container privileged',
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
