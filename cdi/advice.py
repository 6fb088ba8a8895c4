# SPDX-License-Identifier: Apache-2.0
"""Warnings about CDI specs that load, but should be written differently; pure.

Not on the start path. Some of these rules are in the format's prose, and no loader checks them;
some problems crash or mislead consumers; some expose the host. A spec with them still loads.
"""

from __future__ import annotations

import re
import stat

from cdi import document, names, version
from cdi.annotations import MAX_NAME_CHARS, MAX_PREFIX_CHARS, annotation_problems
from cdi.document import Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from os import stat_result
    from typing import Any

    from cdi.document import Path

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

# The types of mounts that have no source in the host's file tree. Any other type gets a warning,
# because a typing error is more likely than a rare file system.
_FILE_SYSTEMS = frozenset(
    "9p autofs binfmt_misc bpf btrfs ceph cgroup cgroup2 cifs configfs"  # noqa: SIM905 (a page)
    " debugfs devpts devtmpfs efivarfs erofs exfat ext2 ext3 ext4 f2fs fuse fuseblk gfs2 hugetlbfs"
    " iso9660 lustre mqueue nfs nfs4 nsfs ntfs3 nvfs ocfs2 overlay proc pstore ramfs resctrl"
    " rpc_pipefs securityfs selinuxfs smb3 squashfs sysfs tmpfs tracefs udf vfat virtiofs xfs"
    " zfs".split()
)


def check(spec: Any, stat_host: Callable[[str], stat_result] | None = None) -> Iterator[Problem]:  # noqa: ANN401 (JSON)
    """Yield the warnings about the normalised *spec*, whose shape may be wrong.

    *stat_host* returns the status of a file of this host. It is None if the spec is for another
    host, whose files cannot be checked.
    """
    if not isinstance(spec, dict):
        return
    yield from _kind(_text(spec, "kind"))
    yield from _annotations(spec, ())
    for path, edits in _all_edits(spec):
        yield from _env(edits, path)
        yield from _nodes(edits, path)
        yield from _mounts(edits, path, stat_host)
        for i, hook in _maps(edits, "hooks"):
            yield from _hook(hook, (*path, "hooks", i), stat_host)
        if _list(edits, "additionalGids"):
            yield Problem(
                "additional-gids",
                (*path, "additionalGids"),
                "docker before 29.5 accepts the groups, but ignores them",
            )
    for i, device in _maps(spec, "devices"):
        name = _text(device, "name")
        if len(name) > MAX_NAME_CHARS:
            text = f"the device name has more than {MAX_NAME_CHARS} characters"
            yield Problem("long-name", ("devices", i, "name"), text)
        yield from _annotations(device, ("devices", i))


def check_version(spec: Any) -> Iterator[Problem]:  # noqa: ANN401 (JSON)
    """Yield the warnings about the version of a *spec* that loads."""
    text = spec["cdiVersion"]
    claimed, needed = text.removeprefix("v"), version.minimum(spec)
    if claimed != text:
        message = 'consumers with a CDI library before 0.5.4 do not know the leading "v"'
        yield Problem("version-prefix", ("cdiVersion",), message)
    if version.KNOWN.index(claimed) > version.KNOWN.index(needed):
        message = f"it is {claimed}, but {needed} is enough: older consumers refuse it needlessly"
        yield Problem("version-high", ("cdiVersion",), message)


def _list(owner: dict[str, Any], member: str) -> list[Any]:
    value = owner.get(member)
    return value if isinstance(value, list) else []


def _maps(owner: dict[str, Any], member: str) -> list[tuple[int, dict[str, Any]]]:
    return [(i, item) for i, item in enumerate(_list(owner, member)) if isinstance(item, dict)]


def _texts(owner: dict[str, Any], member: str) -> list[tuple[int, str]]:
    return [(i, item) for i, item in enumerate(_list(owner, member)) if isinstance(item, str)]


def _text(owner: dict[str, Any], member: str) -> str:
    value = owner.get(member)
    return value if isinstance(value, str) else ""


def _all_edits(spec: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    owners: list[tuple[Path, dict[str, Any]]] = [((), spec)]
    owners += [(("devices", i), device) for i, device in _maps(spec, "devices")]
    for path, owner in owners:
        edits = owner.get("containerEdits")
        if isinstance(edits, dict):
            yield (*path, "containerEdits"), edits


def _kind(kind: str) -> Iterator[Problem]:
    vendor, cls = names.split_kind(kind)
    for part, name, limit in (
        ("vendor", vendor, MAX_PREFIX_CHARS),
        ("class", cls, MAX_NAME_CHARS),
    ):
        if len(name) == 1:
            text = f"a {part} of one character crashes every consumer released so far"
            yield Problem("short-name", ("kind",), text)
        if len(name) > limit:
            text = f"the {part} has more than {limit} characters"
            yield Problem("long-name", ("kind",), text)


def _annotations(owner: dict[str, Any], path: Path) -> Iterator[Problem]:
    annotations = owner.get("annotations")
    if isinstance(annotations, dict):
        for key, text in annotation_problems(annotations):
            here: Path = (*path, "annotations") if key is None else (*path, "annotations", key)
            yield Problem("annotation", here, text)


def _env(owner: dict[str, Any], path: Path) -> Iterator[Problem]:
    seen: set[str] = set()
    for i, entry in _texts(owner, "env"):
        here: Path = (*path, "env", i)
        name = entry.partition("=")[0]
        if "\0" in entry:
            yield Problem("control-character", here, "it has a NUL, which truncates it")
        if name.startswith("LD_"):
            text = f'"{name}" makes programs load code from elsewhere'
            yield Problem("env-loader", here, text)
        if name in seen:
            text = f'"{name}" occurs more than once; consumers differ in which one counts'
            yield Problem("env-repeated", here, text)
        seen.add(name)


def _path(text: str, path: Path) -> Iterator[Problem]:
    """Yield the problems with the path *text*, of the host or the container."""
    if not text:
        return
    parts = text.split("/")
    if _CONTROL.search(text):
        yield Problem("control-character", path, f'"{text}" has a control character')
    if not text.startswith("/"):
        yield Problem("relative-path", path, f'"{text}" is not absolute')
    elif ".." in parts:
        yield Problem("unclean-path", path, f'"{text}" has a ".."')
    else:
        parts = [part for part in parts if part not in ("", ".")]
        if not parts:
            yield Problem("broad-path", path, f'"{text}" is the root of the tree')
        elif parts[0] in ("proc", "sys"):
            yield Problem("kernel-path", path, f'"{text}" is a kernel path below /{parts[0]}')


def _nodes(edits: dict[str, Any], path: Path) -> Iterator[Problem]:
    seen: set[str] = set()
    for i, node in _maps(edits, "deviceNodes"):
        here: Path = (*path, "deviceNodes", i)
        inside, permissions = _text(node, "path"), _text(node, "permissions")
        yield from _path(inside, (*here, "path"))
        yield from _path(_text(node, "hostPath"), (*here, "hostPath"))
        if inside in seen:
            text = f'the device node "{inside}" occurs more than once'
            yield Problem("path-repeated", (*here, "path"), text)
        seen.add(inside)
        if permissions == "none":
            text = 'no consumer released so far accepts "none"'
            yield Problem("permissions-none", (*here, "permissions"), text)
        elif not permissions:
            text = 'without permissions it gets "rwm", and with m the container may make nodes'
            yield Problem("permissions-implied", here, text)


def _mounts(
    edits: dict[str, Any], path: Path, stat_host: Callable[[str], stat_result] | None
) -> Iterator[Problem]:
    seen: set[str] = set()
    for i, mount in _maps(edits, "mounts"):
        here: Path = (*path, "mounts", i)
        source, inside, kind = (_text(mount, m) for m in ("hostPath", "containerPath", "type"))
        options = [option for _, option in _texts(mount, "options")]
        for j, option in _texts(mount, "options"):
            if "," in option or "\0" in option:
                text = f'"{option}" is not one option: a comma or NUL ends it'
                yield Problem("mount-option", (*here, "options", j), text)
        yield from _path(inside, (*here, "containerPath"))
        if inside in seen:
            text = f'the mount on "{inside}" occurs more than once'
            yield Problem("path-repeated", (*here, "containerPath"), text)
        seen.add(inside)
        is_bind = "bind" in options or "rbind" in options
        if not is_bind:
            if kind in _FILE_SYSTEMS or kind.startswith("fuse."):
                # The source of a file system need not be a path.
                continue
            problem = f'"{kind}" is not a file system type' if kind else "there is no type"
            text = (
                f"{problem}, and neither bind nor rbind is an option: low-level runtimes refuse it"
            )
            yield Problem("mount-not-bind", here, text)
        yield from _path(source, (*here, "hostPath"))
        if is_bind and "ro" not in options and not _is_socket(source, stat_host):
            text = "it is writable: add ro unless it is a socket or a directory to be written to"
            yield Problem("mount-writable", here, text)


def _is_socket(path: str, stat_host: Callable[[str], stat_result] | None) -> bool:
    try:
        return stat_host is not None and stat.S_ISSOCK(stat_host(path).st_mode)
    except (OSError, ValueError):
        return False


def _hook(
    hook: dict[str, Any], path: Path, stat_host: Callable[[str], stat_result] | None
) -> Iterator[Problem]:
    program = _text(hook, "path")
    # Otherwise it is an error, and a warning would repeat it.
    if not document.hook_path_problem(program):
        yield from _path(program, (*path, "path"))
    for i, argument in _texts(hook, "args"):
        if "\0" in argument:
            text = "it has a NUL, which truncates it"
            yield Problem("control-character", (*path, "args", i), text)
    if not _list(hook, "env"):
        # runc before 1.3 starts such a hook with the environment of the image, as
        # root of the host: CVE-2025-23266.
        text = "without env, some low-level runtimes give it the variables of the image"
        yield Problem("hook-without-env", path, text)
    yield from _env(hook, path)
    timeout = hook.get("timeout")
    if isinstance(timeout, int) and timeout <= 0:
        yield Problem(
            "hook-timeout", (*path, "timeout"), f"{timeout} is not a positive number of seconds"
        )
    # A startContainer hook's path is resolved in the container.
    if stat_host and program.startswith("/") and hook.get("hookName") != "startContainer":
        text = _host_program(program, stat_host)
        if text:
            yield Problem("hook-program", (*path, "path"), text)


def _host_program(path: str, stat_host: Callable[[str], stat_result]) -> str:
    """Return why the low-level runtime cannot, or should not, run *path* of this host."""
    try:
        status = stat_host(path)
    except OSError as error:
        return f'"{path}" on this host: {error.strerror}'
    except ValueError:
        # A NUL, which is reported elsewhere.
        return ""
    if not stat.S_ISREG(status.st_mode) or not status.st_mode & 0o111:
        return f'"{path}" is not a program on this host'
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f'users other than its owner may write to "{path}" on this host'
    return ""
