# SPDX-License-Identifier: Apache-2.0
"""Decide what is added to a container, from its OCI config and from config.toml.

On the start path. The shim carries the decision out, and `gpuruntime explain` prints it.
Everything about the machine comes from a Host. Nothing here changes the machine, with one
exception: the Host may have to create missing device nodes.
"""

from __future__ import annotations

import posix as os

from cdi import pathnames
from cdi.complete import complete, in_user_namespace
from cdi.edits import WITH_IMAGE, allows_all, apply
from cdi.errors import CdiError
from gpuruntime import config as settings
from gpuruntime.errors import MISSING_DEVICE_ERRORS
from gpuruntime.plan import hook_programs, node_numbers
from gpuruntime.record import Record
from gpuruntime.request import parse
from gpuruntime.request.container import Container

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Protocol

    from cdi.registry import Registry
    from cdi.wire import Edits, Hook, OciConfig
    from gpuruntime.config import Config
    from gpuruntime.errors import GpuRuntimeError
    from gpuruntime.grant import Grant
    from gpuruntime.request.parse import Request

    class Host(Protocol):
        """What `decide` needs from the host."""

        def grant(self, request: Request) -> Grant:
            """Return the grant for *request*, whose edits are not yet completed.

            Raises DriverError, DiscoveryError, RequestError, SpecError, UnresolvedDeviceError.
            """

        def program(self, name: str) -> str:
            """Return the path of the hook program *name*; raise ConfigError if there is none."""

        def make_nodes(self, minors: Sequence[int]) -> bool:
            """Create the driver's nodes and those of *minors*; return whether it tried."""

        def read_registry(self) -> Registry:
            """Return the CDI specs of the configured directories."""

    class Observer(Protocol):
        """The receiver of the parsed request, so that a caller need not parse it again."""

        def on_request(self, request: Request, container: Container) -> None:
            """Take note of *request*, which was read from *container*."""


# The PATH of hooks, which get no variables of the image.
_HOOK_ENV = ("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",)
_GPU = "/dev/nvidia"
# The same text as in remedies, which is loaded only when a create fails.
_CREATE_LINKS = 'run "gpuruntime system create-dev-char-symlinks" as root'
_MAX_DIGITS = 4


class Injection(Record):
    """The decision for *request*: the completed *edits*, None if nothing is added.

    *prestart* is a hook to add, *removed* are the indices of prestart hooks to remove. *warnings*
    and *notes* are sentences for the user. *error* is the reason if the container starts without
    the devices that it requests.
    """

    __slots__ = ("edits", "error", "notes", "prestart", "removed", "request", "warnings")

    def __init__(
        self,
        request: Request,
        edits: Edits | None = None,
        *,
        prestart: dict[str, Any] | None = None,
        removed: Sequence[int] = (),
        warnings: Sequence[str] = (),
        notes: Sequence[str] = (),
        error: GpuRuntimeError | None = None,
    ) -> None:
        self.request = request
        self.edits = edits
        self.prestart = prestart
        self.removed = tuple(removed)
        self.warnings = tuple(warnings)
        self.notes = tuple(notes)
        self.error = error

    def apply(self, document: OciConfig) -> bool:
        """Apply the decision to *document*; return whether anything changes."""
        if self.removed:
            hooks = document["hooks"]
            remaining = [hook for i, hook in enumerate(hooks["prestart"]) if i not in self.removed]
            if remaining:
                hooks["prestart"] = remaining
            else:
                del hooks["prestart"]
        if self.edits is not None:
            rule_count = len(_device_rules(document))
            apply(self.edits, document)
            if self.request.mode == settings.LEGACY:
                # The request stays in config.json for the hook, so the rules may already exist.
                _drop_repeated(_device_rules(document), rule_count)
        if self.prestart is not None:
            if document.get("hooks") is None:
                document["hooks"] = {}
            hooks = document["hooks"]
            hooks["prestart"] = [*(hooks.get("prestart") or ()), self.prestart]
        return bool(self.removed or self.edits is not None or self.prestart is not None)


def decide(
    document: OciConfig, config: Config, host: Host, observer: Observer | None = None
) -> Injection:
    """Return the injection for the container of *document* under *config*.

    The request is reported to *observer* as soon as it is parsed. Raises GpuRuntimeError for a
    request that is malformed, not allowed or for a missing device; with `missing-gpu = "warn"`, a
    missing device is a warning.
    """
    container = Container(document, config)
    request = parse.from_container(container)
    if observer is not None:
        observer.on_request(request, container)
    engine_hooks = _engine_hooks(document)
    is_legacy = (request.mode or config.mode) == settings.LEGACY
    # Outside the legacy mode this runtime does the work of the engine's hooks.
    removed = () if is_legacy else engine_hooks
    if not request:
        return Injection(request, removed=removed)
    try:
        grant = host.grant(request)
        edits, node_warnings = _completed(grant.edits, request, document, config, host)
    except MISSING_DEVICE_ERRORS as error:
        if config["missing-gpu"] != "warn":
            raise
        warning = f"starts without what it asks for: {error}"
        return Injection(request, removed=engine_hooks, warnings=(warning,), error=error)
    warnings = [*grant.warnings, *node_warnings]
    if allows_all(document) and request.ids != ("all",):
        warnings.append("its device rules allow every device, whichever it asks for: privileged")
    edits, notes = _with_environments(edits)
    lost = _lost_on_reload(edits, document)
    if lost:
        warnings.append(
            f'no "/dev/char" link for {", ".join(lost)}: the container loses them at '
            f'"systemctl daemon-reload"; {_CREATE_LINKS}'
        )
    return Injection(
        request,
        edits,
        prestart=_prestart(document, host) if is_legacy and not engine_hooks else None,
        removed=removed,
        warnings=warnings,
        notes=[*grant.notes, *notes],
    )


def _with_environments(edits: Edits) -> tuple[Edits, list[str]]:
    """Return *edits* with an env for each hook that lacks one, and a note for each such hook.

    runc before 1.3 starts a hook without env with the variables of the image (CVE-2025-23266). We
    add the hook, so we set the env that the spec, of whichever vendor, omits.
    """
    hooks_without_env = [hook for hook in edits.get("hooks") or () if _may_have_image_env(hook)]
    if not hooks_without_env:
        return edits, []
    with_env = edits.copy()
    with_env["hooks"] = [
        {**hook, "env": list(_HOOK_ENV)} if _may_have_image_env(hook) else hook
        for hook in edits["hooks"]
    ]
    paths = dict.fromkeys(hook["path"] for hook in hooks_without_env)
    return with_env, [
        f'the hook "{path}" of a CDI spec has no env: it gets PATH, not the variables of the image'
        for path in paths
    ]


def _may_have_image_env(hook: Hook) -> bool:
    return hook["hookName"] in WITH_IMAGE and not hook.get("env")


def _completed(
    edits: Edits, request: Request, document: OciConfig, config: Config, host: Host
) -> tuple[Edits, list[str]]:
    """Return *edits* completed from the host's nodes, and warnings about the nodes.

    Missing nodes are created first if that is allowed.
    """
    user_namespace = in_user_namespace(document)
    if user_namespace:
        edits = _without_groups(edits)
    try:
        return _completed_once(edits, request, user_namespace=user_namespace)
    except CdiError as error:
        failure = error
    if (
        failure.category == "host-device-missing"
        and config["nvidia-container-cli.load-kmods"]
        and host.make_nodes(_minors(edits))
    ):
        try:
            return _completed_once(edits, request, user_namespace=user_namespace)
        except CdiError as error:
            failure = error
    from gpuruntime.plan import unusable_node  # noqa: PLC0415 (only when a create fails)

    raise unusable_node.error(failure, edits, request, config, host.read_registry) from failure


def _completed_once(
    edits: Edits, request: Request, *, user_namespace: bool
) -> tuple[Edits, list[str]]:
    """Return *edits* completed from the nodes that exist, and warnings; raise CdiError."""
    completed = complete(edits, user_namespace=user_namespace)
    # A CDI spec may use other names for the nodes.
    warnings = node_numbers.check(completed) if request.is_automatic else []
    return completed, warnings


def _minors(edits: Edits) -> list[int]:
    """Return the minor numbers of the GPU nodes in *edits*."""
    paths = [node["path"] for node in edits.get("deviceNodes") or ()]
    return [int(path[len(_GPU) :]) for path in paths if _is_gpu(path)]


def _is_gpu(path: str) -> bool:
    number = path[len(_GPU) :]
    is_number = number.isascii() and number.isdecimal() and len(number) <= _MAX_DIGITS
    return path.startswith(_GPU) and is_number


def _without_groups(edits: Edits) -> Edits:
    """Return *edits* without groups of the host, which are not valid in a user namespace."""
    changed = edits.copy()
    changed.pop("additionalGids", None)
    changed["deviceNodes"] = [node.copy() for node in edits.get("deviceNodes") or ()]
    for node in changed["deviceNodes"]:
        node.pop("gid", None)
    return changed


def _device_rules(document: OciConfig) -> list[dict[str, Any]]:
    resources = (document.get("linux") or {}).get("resources") or {}
    return resources.get("devices") or []


def _drop_repeated(rules: list[dict[str, Any]], count: int) -> None:
    """Remove the rules after the first *count* of *rules* that have no effect.

    A rule has no effect if it is among the first *count* and no later one of these denies.
    """
    last_denial = max((i for i in range(count) if not rules[i].get("allow")), default=-1)
    in_force = rules[last_denial + 1 : count]
    rules[count:] = [rule for rule in rules[count:] if rule not in in_force]


def _lost_on_reload(edits: Edits, document: OciConfig) -> list[str]:
    """Return the nodes whose device rules systemd loses when it reloads.

    systemd finds a device by its entry in /dev/char or /sys/dev/char, and NVIDIA's devices have
    none in /sys/dev/char.
    """
    if not has_systemd_cgroup(document):
        return []
    numbers = {
        node["path"]: f"char/{node['major']}:{node.get('minor', 0)}"
        for node in edits.get("deviceNodes") or ()
        if node["type"] == "c"
    }
    return [
        path
        for path, name in numbers.items()
        if not (_has_entry(f"/dev/{name}") or _has_entry(f"/sys/dev/{name}"))
    ]


def has_systemd_cgroup(document: OciConfig) -> bool:
    """Return whether systemd manages the container's cgroup: its path is SLICE:PREFIX:NAME."""
    return str((document.get("linux") or {}).get("cgroupsPath")).count(":") == 2


def _prestart_hooks(document: OciConfig) -> Sequence[dict[str, Any]]:
    return (document.get("hooks") or {}).get("prestart") or ()


def _engine_hooks(document: OciConfig) -> list[int]:
    """Return the indices of prestart hooks that would inject devices by themselves."""
    return [
        i
        for i, hook in enumerate(_prestart_hooks(document))
        if pathnames.basename(str(hook.get("path"))) in parse.ENGINE_HOOKS
    ]


def _prestart(document: OciConfig, host: Host) -> dict[str, Any] | None:
    """Return the prestart hook of the legacy mode, None if *document* already has it."""
    path = host.program(hook_programs.PRESTART_HOOK)
    # The configured program can have any name.
    if any(hook.get("path") == path for hook in _prestart_hooks(document)):
        return None
    return {
        "path": path,
        "args": [pathnames.basename(path), "prestart"],
        "env": list(_HOOK_ENV),
    }


def _has_entry(path: str) -> bool:
    return os.access(path, os.F_OK, follow_symlinks=False)
