# SPDX-License-Identifier: Apache-2.0
"""Compute the container edits that give a container the driver and GPUs; pure.

On the start path. There are two styles of hooks: one hook that does every step, the default, or
one hook for each step, for tools that expect to find the incumbent's hooks in a spec.
"""

from __future__ import annotations

import posixpath

from gpuruntime.model import CSV, WSL
from gpuruntime.plan.devices import ALL, GpuDevice
from gpuruntime.plan.driver_files import ABIS_OF_32_BIT
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from typing import Any

    from cdi.wire import DeviceNode, Edits, Hook, Mount
    from gpuruntime.model import Driver, File, Inventory, Library, Node

HOOK_NAME = "gpu-cdi-hook"
LIBRARY_DIRECTORIES = "NVIDIA_CTK_LIBCUDA_DIR"
# Consumers written in Go lose an empty list, and runc before 1.3 then runs the hook with the
# image's environment (CVE-2025-23266).
HOOK_ENV = ("GPURUNTIME_HOOK=1",)
HOOK_TIMEOUT_S = 30
# The default deadline of the hook, and the largest that it accepts.
HOOK_DEADLINE_S, MAX_HOOK_DEADLINE_S = 10, 600
_TIMEOUT_AFTER_S = 20
MOUNT_OPTIONS = ("ro", "nosuid", "nodev", "rbind", "rprivate")
# A client writes to a daemon's socket, and MPS makes pipes in its directory.
IPC_OPTIONS = ("nosuid", "nodev", "rbind", "rprivate", "noexec")
LINKS = "create-symlinks"
COMPAT = "enable-cuda-compat"
LDCACHE = "update-ldcache"
PARAMS = "disable-device-node-modification"
PROFILE = "update-application-profile"
CHMOD = "chmod"
ALL_HOOKS = "all"
# In the order in which they must run.
HOOKS = (LINKS, COMPAT, LDCACHE, PARAMS, PROFILE, CHMOD)
# The steps that have an effect on a platform; all of them on the others.
_STEPS = {WSL: (LINKS, LDCACHE), CSV: (LINKS, COMPAT, LDCACHE)}
# The GPU for which images have CUDA in a directory of its own, and that directory.
_ORIN = "Orin (nvgpu)"
_ORIN_COMPAT = "/usr/local/cuda/compat_orin"
_CHMOD_DIRECTORIES = ("/dev/dri", "/dev/nvidia-caps")
_CHMOD_MODE = "755"
# Programs under these names know the incumbent's hooks only.
_SEPARATE_ONLY = ("nvidia-cdi-hook", "nvidia-ctk")


class Style(Record):
    """How edits are written: the host *path* of the hook program, and its disabled steps.

    ALL_HOOKS in *disabled* disables every step. A step in *enabled* is never disabled; CHMOD is
    disabled unless it is in *enabled*. *separate*: one hook for each step, which is always the
    case for the incumbent's programs. *ldconfig* is the argument of the step that updates the
    loader cache, "" for its default; *ldconfig_mode* is the option of our hook, "" for its
    default. *groups*: with the groups of device nodes. *deadline_s* is the deadline of our hook.
    *compat_root* is the directory of CUDA in images for a Tegra, "" for the usual one.
    """

    __slots__ = (
        *("compat_root", "deadline_s", "disabled", "groups", "ldconfig", "ldconfig_mode", "path"),
        "separate",
    )

    def __init__(  # noqa: PLR0913 (options, given by name)
        self,
        path: str,
        *,
        disabled: Collection[str] = (),
        enabled: Collection[str] = (),
        separate: bool = False,
        ldconfig: str = "",
        ldconfig_mode: str = "",
        groups: bool = False,
        deadline_s: int = HOOK_DEADLINE_S,
        compat_root: str = "",
    ) -> None:
        self.path = path
        self.compat_root = compat_root
        self.groups = groups
        off = HOOKS if ALL_HOOKS in disabled else (*disabled, CHMOD)
        self.disabled = frozenset(off) - frozenset(enabled)
        self.separate = separate or posixpath.basename(path) in _SEPARATE_ONLY
        self.ldconfig = ldconfig
        self.ldconfig_mode = ldconfig_mode
        self.deadline_s = deadline_s


class TegraCuda(Record):
    """The CUDA *version* of a Tegra's driver, and the *directory* of newer CUDA in images for it.

    The directory is "" for the usual one.
    """

    __slots__ = ("directory", "version")

    def __init__(self, version: str, directory: str) -> None:
        self.version = version
        self.directory = directory


def tegra_cuda(inventory: Inventory, style: Style) -> TegraCuda | None:
    """Return the CUDA of a Tegra, None on another platform or if NVML does not report it."""
    if inventory.driver.platform != CSV or not inventory.cuda_version:
        return None
    is_orin = any(_ORIN in item.gpu.name for item in inventory.gpus)
    directory = (style.compat_root or _ORIN_COMPAT) if is_orin else ""
    return TegraCuda(inventory.cuda_version, directory)


def common_edits(
    driver: Driver,
    nodes: Iterable[Node],
    links: Sequence[str],
    style: Style,
    cuda: TegraCuda | None = None,
) -> Edits:
    """Return the edits that every container with the *driver* gets, whichever GPUs it has.

    *nodes* are the control nodes; *links* are the links to device nodes of the container; *cuda*
    is the result of `tegra_cuda`.
    """
    mounts = [_mount(library, MOUNT_OPTIONS) for library in driver.libraries]
    mounts += [
        _mount(file, IPC_OPTIONS if file.kind == "ipc" else MOUNT_OPTIONS) for file in driver.files
    ]
    hooks = _separate_hooks if style.separate else _combined_hook
    style = _on_platform(style, driver.platform)
    return {
        **node_edits(nodes, style),
        # NVIDIA_VISIBLE_DEVICES=void tells later programs that the driver is already injected.
        "env": [*library_directories(driver), "NVIDIA_VISIBLE_DEVICES=void"],
        "mounts": sorted(
            mounts, key=lambda m: (m["containerPath"].count("/"), m["containerPath"])
        ),
        "hooks": hooks(driver, links, style, cuda),
    }


def _on_platform(style: Style, platform: str) -> Style:
    """Return *style* without the steps that have no effect on *platform*."""
    steps = _STEPS.get(platform)
    if steps is None:
        return style
    return Style(
        style.path,
        disabled=(*style.disabled, *(step for step in HOOKS if step not in steps)),
        separate=style.separate,
        ldconfig=style.ldconfig,
        ldconfig_mode=style.ldconfig_mode,
        groups=style.groups,
        deadline_s=style.deadline_s,
        compat_root=style.compat_root,
    )


def library_directories(driver: Driver) -> list[str]:
    """Return the variable that names the directories of the *driver*'s libraries in a container.

    It lists the directories of 64-bit libraries with the driver's version in their names, except
    that of the VDPAU plug-ins, as the incumbent's variable does. [] if there are none, and on
    platforms whose libraries have no version in their names.
    """
    if driver.platform in _STEPS:
        return []
    ending = f".so.{driver.version}"
    directories = [
        posixpath.dirname(library.container_path)
        for library in driver.libraries
        if library.abi not in ABIS_OF_32_BIT and library.container_path.endswith(ending)
    ]
    names = dict.fromkeys(path for path in directories if posixpath.basename(path) != "vdpau")
    return [f"{LIBRARY_DIRECTORIES}={':'.join(names)}"] if names else []


def device_edits(device: GpuDevice, style: Style) -> Edits:
    """Return the edits for *device*, without the common edits."""
    nodes = [device.gpu.node]
    if device.mig is None:
        nodes += [*device.gpu.others, *device.gpu.drm]
    else:
        nodes += device.mig[1:]
    edits = node_edits(nodes, style)
    hooks = []
    if style.separate and device.mig is None and device.gpu.links:
        hooks.append(_hook(style, LINKS, _link_words(device.gpu.links)))
    if style.separate:
        hooks.append(_hook(style, CHMOD, _chmod_words(nodes)))
    enabled_hooks = [hook for hook in hooks if hook is not None]
    if enabled_hooks:
        edits["hooks"] = enabled_hooks
    return edits


def named_devices(
    devices: Sequence[GpuDevice],
    strategies: Sequence[str],
    style: Style,
    *,
    with_all: bool = True,
) -> list[tuple[str, Edits]]:
    """Return (name, edits) of each of *devices* by each strategy, and of all of them as `all`."""
    named: dict[str, Edits] = {}
    for device in devices:
        edits = device_edits(device, style)
        for strategy in strategies:
            name = device.name(strategy)
            if name:
                named.setdefault(name, edits)
    if with_all and named and ALL not in named:
        named[ALL] = merged(named.values())
    return list(named.items())


def merged(parts: Iterable[Edits]) -> Edits:
    """Return the union of *parts*, each item once, device nodes sorted."""
    merged: dict[str, dict[str, Any]] = {}
    for part in parts:
        for member, items in part.items():
            seen = merged.setdefault(member, {})
            for item in items:  # type: ignore[attr-defined]  # all members here are lists
                seen.setdefault(_identity(item), item)
    result = {member: list(items.values()) for member, items in merged.items()}
    if "deviceNodes" in result:
        result["deviceNodes"].sort(key=lambda node: (node["path"].count("/"), node["path"]))
    return result  # type: ignore[return-value]  # the members are those of edits


def _identity(item: Any) -> str:  # noqa: ANN401 (an object, a string, a number)
    """Return a hashable value that is equal for equal items of a list of edits."""
    return repr(sorted(item.items()) if isinstance(item, dict) else item)


def node_edits(nodes: Iterable[Node], style: Style) -> Edits:
    """Return the edits that let a container use *nodes*."""
    nodes = list(nodes)
    edits: Edits = {"deviceNodes": [_node(node) for node in nodes]}
    groups = sorted({node.group for node in nodes} - {0})
    if style.groups and groups:
        edits["additionalGids"] = groups
    return edits


def empty_device() -> Edits:
    """Return the edits of the device `none`: no GPU; CDI does not allow a device without edits."""
    return {"env": ["NVCT_EMPTY_DEVICE="]}


def management_edits(nodes: Sequence[Node], style: Style) -> Edits:
    """Return the edits of the one device of management mode: every node of the driver."""
    edits = node_edits(nodes, style)
    chmod = _hook(style, CHMOD, _chmod_words(nodes)) if style.separate else None
    if chmod is not None:
        edits["hooks"] = [chmod]
    return edits


def links(driver: Driver) -> list[str]:
    """Return `TARGET::LINK` for every link to a file of the driver, each once.

    For a library these are the SONAME link, the `.so` link if it has one, and its further links.
    """
    pairs: dict[str, None] = {}
    for library in driver.libraries:
        directory, name = posixpath.split(library.container_path)
        if library.soname != name:
            pairs[f"{name}::{directory}/{library.soname}"] = None
        if library.dev_link:
            pairs[f"{library.soname}::{directory}/{library.dev_link}"] = None
        pairs.update(dict.fromkeys(library.links))
    for file in driver.files:
        pairs.update(dict.fromkeys(file.links))
    return list(pairs)


def _node(node: Node) -> DeviceNode:
    # No type, numbers or mode: consumers read them from the host, where majors move between boots.
    edit: DeviceNode = {"path": node.container_path}
    if node.host_path != node.container_path:
        edit["hostPath"] = node.host_path
    edit["permissions"] = "rw"
    if node.group:
        # Consumers read the mode from the host, but not the group.
        edit["gid"] = node.group
    return edit


def _mount(item: Library | File, options: Sequence[str]) -> Mount:
    return {
        "hostPath": item.host_path,
        "containerPath": item.container_path,
        "options": list(options),
    }


def _combined_hook(
    driver: Driver, device_links: Sequence[str], style: Style, cuda: TegraCuda | None
) -> list[Hook]:
    words: list[str] = []
    if LINKS not in style.disabled:
        words += _link_words(links(driver))
        for link in device_links:
            words += ["--device-link", link]
    if COMPAT not in style.disabled and driver.platform == CSV:
        for option, value in _tegra_options(cuda, "--cuda-compat-cuda", "--cuda-compat-root"):
            words += [option, value]
    elif COMPAT not in style.disabled and driver.version:
        words += ["--cuda-compat", driver.version]
    if LDCACHE not in style.disabled:
        words += _library_words(driver, style)
    if PARAMS not in style.disabled:
        words.append("--mask-params")
    if PROFILE not in style.disabled:
        words.append("--application-profile")
    if CHMOD not in style.disabled:
        for directory in _CHMOD_DIRECTORIES:
            words += ["--chmod", f"{_CHMOD_MODE}::{directory}"]
    if not words:
        return []
    return [_hook_of(style, "update-container", words)]


def _tegra_options(cuda: TegraCuda | None, version: str, directory: str) -> list[tuple[str, str]]:
    """Return (option, value) of *cuda*, whose options are *version* and *directory*."""
    if cuda is None:
        return []
    pairs = [(version, cuda.version), (directory, cuda.directory)]
    return [(option, value) for option, value in pairs if value]


def _library_words(driver: Driver, style: Style) -> list[str]:
    words = []
    for library in driver.libraries:
        words += ["--library", f"{library.soname}::{library.container_path}::{library.abi}"]
    if words and style.ldconfig_mode:
        words += ["--ldconfig-mode", style.ldconfig_mode]
    if words and style.ldconfig:
        words += ["--ldconfig-path", style.ldconfig]
    return words


def _separate_hooks(
    driver: Driver, device_links: Sequence[str], style: Style, cuda: TegraCuda | None
) -> list[Hook]:
    # The edits of each device have the links to its nodes.
    del device_links
    directories = dict.fromkeys(posixpath.dirname(lib.container_path) for lib in driver.libraries)
    ldcache = ["--ldconfig-path", style.ldconfig] if style.ldconfig else []
    for directory in directories:
        ldcache += ["--folder", directory]
    compat: list[str] | None = [f"--host-driver-version={driver.version}"]
    if driver.platform == CSV:
        pairs = _tegra_options(cuda, "--host-cuda-version", "--cuda-compat-container-root")
        compat = [f"{option}={value}" for option, value in pairs] or None
    steps = {
        LINKS: _link_words(links(driver)),
        COMPAT: compat,
        LDCACHE: ldcache if directories else None,
        PARAMS: [],
        PROFILE: [],
    }
    hooks = (_hook(style, name, words) for name, words in steps.items())
    return [hook for hook in hooks if hook is not None]


def _link_words(pairs: Iterable[str]) -> list[str]:
    return [word for pair in pairs for word in ("--link", pair)]


def _chmod_words(nodes: Iterable[Node]) -> list[str] | None:
    directories = {posixpath.dirname(node.container_path) for node in nodes}
    present = [directory for directory in _CHMOD_DIRECTORIES if directory in directories]
    words = [word for directory in present for word in ("--path", directory)]
    return ["--mode", _CHMOD_MODE, *words] if present else None


def _hook(style: Style, name: str, words: list[str] | None) -> Hook | None:
    """Return the hook of one step; None if it is disabled or has nothing to do."""
    if name in style.disabled or words is None or (name == LINKS and not words):
        return None
    return _hook_of(style, name, words)


def _hook_of(style: Style, name: str, words: list[str]) -> Hook:
    program = posixpath.basename(style.path)
    # The incumbent's nvidia-ctk has its hooks as subcommands of "hook".
    front = ["hook"] if program == "nvidia-ctk" else []
    if style.deadline_s != HOOK_DEADLINE_S and program not in _SEPARATE_ONLY:
        front = [f"--deadline={style.deadline_s}"]
    return {
        "hookName": "createContainer",
        "path": style.path,
        "args": [program, *front, name, *words],
        "env": list(HOOK_ENV),
        "timeout": max(HOOK_TIMEOUT_S, style.deadline_s + _TIMEOUT_AFTER_S),
    }
