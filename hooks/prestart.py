# SPDX-License-Identifier: Apache-2.0
"""The prestart hook: bring the driver's files that a container asks for, and missing devices.

OCI runtime config, "hooks", prestart: it runs on the host when the container's namespaces exist
and its root has not been entered. Our runtime has put the devices into config.json by then. Where
it is not in the path (`docker run --gpus` with runc), the low-level runtime has set the
container's cgroup without them: then the hook binds the nodes, and allows them in that cgroup.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal without enum
import os
import posixpath

from cdi.complete import complete, in_user_namespace
from cdi.edits import has_user_namespace
from cdi.errors import CdiError
from gpuruntime import __version__, slowpath
from gpuruntime import config as settings
from gpuruntime.errors import (
    BundleError,
    ConfigError,
    DiscoveryError,
    DriverError,
    GpuRuntimeError,
    RequestError,
    UnresolvedDeviceError,
)
from gpuruntime.oci.bundle import Bundle
from gpuruntime.plan import from_inventory, sources
from gpuruntime.request import parse
from gpuruntime.snapshots import config_snapshot, inventory_snapshot
from gpuruntime.system import device_grant, mounts, syscalls
from gpuruntime.system.bind import BindMount
from hooks import options, state, update_container

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from cdi.wire import DeviceNode, Edits, OciConfig
    from gpuruntime.config import Config
    from gpuruntime.request.parse import Request
    from gpuruntime.system.device_program import Device
    from gpuruntime.system.operation import Operation
    from hooks.debug_log import DebugLog
    from hooks.options import OptionValues

NAME = "prestart"
# The incumbent's hook has them, and does nothing there.
NOTHING = ("poststart", "poststop")
CONFIG, VERSION = "config", "version"
MAX_PID = 1 << 22
# The incumbent's ways differ in who does it; what no other hook of ours does is done here.
_COMPAT = {"ldconfig": True, "mount": True, "hook": True, "disabled": False}
_COMPAT_OF_OLD = "allow-cuda-compat-libs-from-container"
_DEBUG = "nvidia-container-cli.debug"
_ACCESS = frozenset("rwm")
_NODE_OPTIONS = ("bind", "nosuid", "noexec")
_NO_CGROUPS = "nvidia-container-cli.no-cgroups"
# What `missing-gpu = "warn"` lets pass: what is not there, not what may not be had.
MISSING = (UnresolvedDeviceError, DriverError, DiscoveryError)


class NotGrantedError(GpuRuntimeError):
    """A device that is there, and that neither config.json nor the hook may let it use."""

    phase = "device"


class Plan:
    """What is to be done, and in the mount namespace of which process; *bundle* has the root.

    *devices* are those to be allowed in the cgroup of that process. Nothing is done where
    *warning* says that the container starts without what it asks for. *log* is the debug log of
    the hook, None without one.
    """

    def __init__(
        self,
        bundle: str,
        pid: int,
        operations: Sequence[Operation] = (),
        *,
        devices: Sequence[Device] = (),
        deadline_s: int = 0,
        warning: str = "",
        log: DebugLog | None = None,
    ) -> None:
        self.bundle = bundle
        self.operations = operations
        self.deadline_s = deadline_s
        self.warning = warning
        self.log = log
        self._devices = devices
        self._pid = pid

    def summary(self) -> str:
        """Return in one line what `enter` will do."""
        devices = ", ".join(f"{kind} {major}:{minor}" for kind, major, minor in self._devices)
        allow = f", allow the devices {devices} in its cgroup" if devices else ""
        return f"enter the mount namespace of process {self._pid}{allow}"

    def enter(self) -> None:
        """Enter that namespace and allow the devices; raise GpuRuntimeError.

        BundleError if it is not a namespace that the container is to have. What tells it from all
        others is the root: the low-level runtime has mounted that once more, there alone, and has
        not made it `/` yet. Nothing is loaded from here on.
        """
        pid = self._pid
        mounted = _mounts_on_root(self.bundle)
        cgroup = None
        try:
            process = os.pidfd_open(pid)
            namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
            host = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
            if self._devices:
                cgroup = device_grant.cgroup_of(pid)
            # A process that ended meanwhile may have left its number to another.
            _signal.pidfd_send_signal(process, 0)
            ours, theirs = os.fstat(host), os.fstat(namespace)
            before = os.stat("/")
            if (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino):
                raise _unusable(f"process {pid} is in the mount namespace of this hook")
            syscalls.setns(namespace, syscalls.CLONE_NEWNS)
            after = os.stat("/")
        except OSError as error:
            raise _unusable(f"process {pid}: {error.strerror or error}") from error
        if (before.st_dev, before.st_ino) != (after.st_dev, after.st_ino):
            raise _unusable(f"process {pid} has entered a root already")
        if _mounts_on_root(self.bundle) <= mounted:
            raise _unusable(f"process {pid} does not have its root mounted")
        if cgroup is not None:
            # With less than all the time for systemd, the error can name it.
            cgroup.allow(self._devices, host, self.deadline_s / 2)
            cgroup.close()
        for fd in (process, namespace, host):
            os.close(fd)


def _mounts_on_root(bundle: str) -> int:
    """Return how many mounts this process has on the root of *bundle*; raise BundleError."""
    root = state.open_root(bundle)
    try:
        return mounts.count_on(root)
    finally:
        root.close()


def read(arguments: list[str]) -> tuple[str, OptionValues]:
    """Return the command in *arguments*, "" where they cannot be read, and the options.

    As in the incumbent's, options come first, and what is behind the command does not count.
    """
    at = 0
    while at < len(arguments) and arguments[at].startswith("-"):
        at += 2 if arguments[at] in (f"-{CONFIG}", f"--{CONFIG}") else 1
    try:
        option_values = options.parse("hook", arguments[:at], (CONFIG,), (VERSION,))
    except RequestError:
        return "", {}
    return "".join(arguments[at : at + 1]), option_values


def answer(command: str, option_values: OptionValues, program: str) -> tuple[str, int]:
    """Return what to say, and the exit status, of a *command* that has no work.

    The version is what was asked for, and goes to standard output.
    """
    if VERSION in option_values:
        text = f"{program} version {__version__}\n"
        if program.startswith("nvidia-"):
            # Programs look for these words in what its names print.
            text = f"NVIDIA Container Runtime Hook version {__version__}\n{text}"
        os.write(1, text.encode("ascii", "backslashreplace"))
        return "", 0
    if command in NOTHING:
        return "", 0
    return f"usage: {program} [-debug] [-config FILE] prestart|poststart|poststop", 2


def plan(state_: dict[str, Any], option_values: OptionValues, cli_python: str) -> Plan | None:
    """Return what the container of the OCI state *state_* is to get, None if it asks for nothing.

    Raises GpuRuntimeError, also where the container can be option_values its devices by nobody.
    """
    bundle = state.bundle_of(state_)
    document = _read_config(bundle)
    config = _load(options.last(option_values, CONFIG), cli_python)
    legacy = f"{settings.RUNTIME}.mode"
    asked = parse.from_oci(document, settings.Config({**config.values, legacy: "legacy"}, None))
    if not asked:
        return None
    log = _debug_log(config, bundle)
    try:
        return _plan(asked, document, state_, config, cli_python, log)
    except GpuRuntimeError as error:
        if log is not None:
            log.record(f"failed: {error}")
        raise


def _debug_log(config: Config, bundle: str) -> DebugLog | None:
    """Return the log that *config* asks for, None if it asks for none."""
    path = config[_DEBUG]
    if path in ("", os.devnull):
        return None
    from hooks import debug_log  # noqa: PLC0415 (hardly any config asks for it)

    return debug_log.DebugLog(path, bundle)


def _plan(
    asked: Request,
    document: OciConfig,
    state_: dict[str, Any],
    config: Config,
    cli_python: str,
    log: DebugLog | None,
) -> Plan:
    """Return the plan for *asked*, the request of *document*; raise GpuRuntimeError."""
    bundle = state.bundle_of(state_)
    _require_mode(config)
    pid = _pid_of(state_)
    try:
        nodes, edits = _wanted(asked, config, cli_python)
    except MISSING as error:
        if config["missing-gpu"] != "warn":
            raise
        warning = f"starts without what it asks for: {error}"
        if log is not None:
            log.record(f"warning: {warning}")
        return Plan(bundle, pid, warning=warning)
    devices = _to_allow(nodes, document, config)
    operations: list[Operation] = _to_bring(nodes, document)
    operations += [
        BindMount(mount["hostPath"], mount["containerPath"], mount["options"])
        for mount in edits.get("mounts") or ()
    ]
    for hook in edits.get("hooks") or ():
        words = hook["args"][hook["args"].index(update_container.NAME) + 1 :]
        operations += update_container.plan(update_container.read(words))
    _load_modules(operations)
    deadline_s = from_inventory.hook_deadline(config)
    return Plan(bundle, pid, operations, devices=devices, deadline_s=deadline_s, log=log)


def _wanted(asked: Request, config: Config, cli_python: str) -> tuple[list[DeviceNode], Edits]:
    """Return the device nodes that *asked* gets, and what of the driver's files.

    Raises GpuRuntimeError, one of MISSING if there is no such device.
    """
    inventory, _ = sources.inventory_for(
        asked, lambda *, fresh: inventory_snapshot.of_machine(config, cli_python, fresh=fresh)
    )
    # The path of a hook is not used: its steps are taken here.
    compat = _COMPAT.get(
        config[f"{settings.RUNTIME}.modes.legacy.cuda-compat-mode"],
        _COMPAT_OF_OLD in config.features,
    )
    style = from_inventory.style(config, "/gpu-cdi-hook", cuda_compat=compat)
    try:
        edits = complete(from_inventory.grant(asked, inventory, config, style).edits)
    except CdiError as error:
        from gpuruntime import remedies  # noqa: PLC0415 (only on the failing way)

        raise UnresolvedDeviceError(
            f"cannot give a device to the container: {error}",
            remedies.create_nodes(config.driver_root),
        ) from error
    files = from_inventory.driver_edits(asked, inventory, config, style).edits
    return edits["deviceNodes"], files


def _to_allow(nodes: Sequence[DeviceNode], document: OciConfig, config: Config) -> list[Device]:
    """Return those of *nodes* that the hook has to allow; raise NotGrantedError if it may not."""
    missing = [node for node in nodes if not may_use(node, document)]
    if not missing:
        return []
    if in_user_namespace({}) and not has_user_namespace(document):
        # The engine is in it as well: there no low-level runtime can refuse a device either.
        return []
    if config[_NO_CGROUPS]:
        raise _not_granted(
            missing,
            f'"{_NO_CGROUPS}" forbids the hook to allow it',
            f'run "gpuruntime config --set {_NO_CGROUPS}=false --in-place"',
        )
    return list(dict.fromkeys(_numbers(node) for node in missing))


def _to_bring(nodes: Sequence[DeviceNode], document: OciConfig) -> list[Operation]:
    """Return what brings those of *nodes* that are missing; raise NotGrantedError."""
    missing = [node for node in nodes if not has_node(node, document)]
    if missing and has_user_namespace(document):
        # Its /dev takes no file of an owner whom the namespace does not have.
        raise _not_granted(
            missing,
            "a hook cannot bring it into a container with a user namespace of its own",
            device_grant.HINT,
        )
    return [
        BindMount(node.get("hostPath") or node["path"], node["path"], _NODE_OPTIONS)
        for node in missing
    ]


def _not_granted(nodes: Sequence[DeviceNode], why: str, hint: str) -> NotGrantedError:
    paths = ", ".join(node["path"] for node in nodes)
    return NotGrantedError(f"the container may not use {paths}, and {why}", hint)


def _load_modules(operations: Iterable[Operation]) -> None:
    """Load what *operations* would load when they need it: then it is too late."""
    from gpuruntime.formats import cuda_note, elf  # noqa: F401, PLC0415 (no other hook does so)

    if any(operation.ldconfig for operation in operations):
        from gpuruntime.system import sandbox  # noqa: F401, PLC0415 (as above)


def _pid_of(state_: dict[str, Any]) -> int:
    """Return the pid of the container's first process; raise BundleError."""
    pid = state_.get("pid")
    if type(pid) is not int or not 1 <= pid <= MAX_PID:
        raise _unusable(f"the state on standard input has no pid: {repr(pid)[:80]}")
    return pid


def _read_config(bundle: str) -> OciConfig:
    document, doubt = Bundle(bundle).parse()
    if doubt is not None:
        raise _unusable(f'the config.json of "{bundle}": {doubt}')
    for member in ("ociVersion", "process", "root"):
        if not document.get(member):
            raise _unusable(f'the config.json of "{bundle}" has no "{member}"')
    return document


def _load(path: str, cli_python: str) -> Config:
    """Return the config in force, or that of the file *path* if it is option_values."""

    def compiled(path: str) -> Any:  # noqa: ANN401 (JSON)
        answer = slowpath.ask(cli_python, "config", path)
        if "error" in answer:
            raise ConfigError(answer["error"], answer["hint"])
        return answer["values"]

    if path and not os.path.exists(path):
        raise ConfigError(f'there is no config file "{path}"', "name one that exists")
    return config_snapshot.load({"GPURUNTIME_CONFIG": path}, compiled)


def _require_mode(config: Config) -> None:
    """Raise ConfigError where this hook is not to be used."""
    if config.mode in (settings.AUTO, settings.LEGACY):
        return
    if not config[f"{settings.RUNTIME}-hook.skip-mode-detection"]:
        raise ConfigError(
            f'invoking the hook directly, as "docker run --gpus" does, is not supported in the '
            f'mode "{config.mode}"',
            'use "docker run --runtime gpuruntime"',
        )


def has_node(node: DeviceNode, document: OciConfig) -> bool:
    """Return whether *document* brings *node* into the container, whatever the cgroup says."""
    return any(
        device.get("path") == node["path"]
        # "u" is an older word for a character device: mknod(1).
        and (str(device.get("type")).replace("u", "c"), device.get("major"), device.get("minor"))
        == _numbers(node)
        for device in (document.get("linux") or {}).get("devices") or ()
    ) or any(_brings(mount, node) for mount in document.get("mounts") or ())


def may_use(node: DeviceNode, document: OciConfig) -> bool:
    """Return whether *document* lets the container read and write *node*, if that is there."""
    rules = ((document.get("linux") or {}).get("resources") or {}).get("devices")
    return {"r", "w"} <= _access(_numbers(node), rules)


def _numbers(node: DeviceNode) -> Device:
    return node["type"], node.get("major", 0), node.get("minor", 0)


def _brings(mount: dict[str, Any], node: DeviceNode) -> bool:
    """Return whether *mount* is of the host's *node*, or of its directory."""
    host_path = node.get("hostPath") or node["path"]
    source, destination = str(mount.get("source")), str(mount.get("destination"))
    if destination == node["path"]:
        return source == host_path
    return host_path == node["path"] and source == destination == posixpath.dirname(host_path)


def _access(numbers: tuple[str, int, int], rules: Iterable[dict[str, Any]] | None) -> set[str]:
    """Return what of "rwm" *rules* leave of a device; the last that is about it counts."""
    allowed: set[str] = set()
    for rule in rules or ():
        kind = rule.get("type") or "a"
        access = set(str(rule.get("access") or "rwm"))
        if kind == "a":
            # All devices, whatever numbers and access the rule has: cgroup-v1/devices.rst.
            access = set(_ACCESS)
        elif kind != numbers[0] or any(
            rule.get(name) not in (None, -1, number)
            for name, number in zip(("major", "minor"), numbers[1:])
        ):
            continue
        allowed = allowed | access if rule.get("allow") else allowed - access
    return allowed


def _unusable(why: str) -> BundleError:
    return BundleError(
        f"the container cannot be worked on: {why}",
        "let an OCI runtime call this hook as prestart hook; it is not a command for people",
    )
