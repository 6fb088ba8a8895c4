# SPDX-License-Identifier: Apache-2.0
"""The bundle: read config.json strictly, replace it atomically.

runc, crun and Python read some documents differently (repeated members, other letter case, bytes
that are not valid UTF-8). Such a document is never edited, because the low-level runtime might not
run what we edited.
"""

from __future__ import annotations

import _stat as stat
import posix as os

from cdi import pathnames, strictjson
from gpuruntime.errors import BundleError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from cdi.wire import OciConfig

CONFIG_NAME = "config.json"
MAX_CONFIG_BYTES = 16 << 20
MAX_DEPTH = 64
# Values in a document. A short text can hold many, and each takes some hundred bytes of memory.
MAX_VALUES = 500_000

# Object → its members that we read or write, from OCI config.md and config-linux.md. runc accepts
# them in other letter case, crun does not.
_OBJECTS: dict[str, tuple[str, ...]] = {
    "": ("ociVersion", "process", "root", "mounts", "hooks", "linux", "annotations"),
    "process": ("env", "user", "args", "cwd", "capabilities", "terminal"),
    "process.user": ("uid", "gid", "additionalGids"),
    "root": ("path", "readonly"),
    "linux": ("devices", "resources", "namespaces", "intelRdt", "netDevices"),
    "linux.resources": ("devices",),
    "linux.netDevices": (),
    "hooks": (
        "prestart",
        "createRuntime",
        "createContainer",
        "startContainer",
        "poststart",
        "poststop",
    ),
}
# Object → its members that must be lists of objects, if present.
_LISTS: dict[str, tuple[str, ...]] = {
    "": ("mounts",),
    "linux": ("devices", "namespaces"),
    "linux.resources": ("devices",),
    "hooks": _OBJECTS["hooks"],
}
# The members that we read in the objects of those lists, and in process.capabilities.
_READ = frozenset(
    {
        *("access", "allow", "args", "bounding", "destination", "env", "fileMode", "gid"),
        *("major", "minor", "options", "path", "source", "timeout", "type", "uid"),
    }
)
_SPELLED = {name.casefold(): name for name in _READ}


def known_names() -> frozenset[str]:
    """Return the member names that a config.json must not have in another spelling."""
    return _READ.union(*_OBJECTS.values())


class Bundle:
    """A bundle directory, held open. `data` is the content of its config.json."""

    def __init__(self, path: str, name: str = CONFIG_NAME) -> None:
        """Open the bundle *path* and read its config *name*; raise BundleError."""
        self.path = pathnames.join(path, name)
        self._name = name
        try:
            self._dirfd = os.open(path or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unreadable(error.strerror or "?") from error
        # O_NONBLOCK: a FIFO must not hang the engine. O_NOFOLLOW: a link must not lead elsewhere.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, dir_fd=self._dirfd)
        except OSError as error:
            raise self._unreadable(error.strerror or "?") from error
        try:
            self._status = os.fstat(fd)
            if not stat.S_ISREG(self._status.st_mode):
                raise self._unreadable("not a regular file")
            self.data = self._read(fd)
        finally:
            os.close(fd)

    def __del__(self) -> None:
        """Close the descriptor of the directory, which only this object has."""
        fd = getattr(self, "_dirfd", None)
        if fd is not None:
            os.close(fd)

    def _unreadable(self, why: str) -> BundleError:
        return BundleError(
            f'cannot read "{self.path}": {why}', "give the bundle a config.json that is a file"
        )

    def _read(self, fd: int) -> bytes:
        data = b""
        try:
            while len(data) <= MAX_CONFIG_BYTES:
                chunk = os.read(fd, MAX_CONFIG_BYTES + 1 - len(data))
                if not chunk:
                    return data
                data += chunk
        except OSError as error:
            raise self._unreadable(error.strerror or "?") from error
        raise self._unreadable(f"larger than {MAX_CONFIG_BYTES} bytes")

    def parse(self) -> tuple[OciConfig, str | None]:
        """Return the document and, if it must not be edited, the reason; raise BundleError.

        BundleError: the data is not a JSON object, so the low-level runtime would fail as well.
        """
        try:
            return parse(self.data)
        except ValueError as error:
            raise BundleError(
                f'"{self.path}" is not a JSON object: {error}',
                "let the engine write the bundle again",
            ) from error

    def ambiguous(self, why: str) -> BundleError:
        """Return the error for a document that requests GPUs and must not be edited."""
        return BundleError(
            f'cannot add GPUs to "{self.path}", which runtimes read differently: {why}',
            "write the config without repeated or misspelled members, in UTF-8",
        )

    def store(self, config: OciConfig) -> None:
        """Replace config.json by *config*, keeping mode and owner; raise BundleError.

        A new file is renamed over the old one, so that no reader sees a partial document. The file
        is not synced, because a bundle does not survive a power failure.
        """
        # Imported here because the hook imports this module and never replaces a config.
        from gpuruntime import atomic_replace  # noqa: PLC0415

        def finish(fd: int) -> None:
            status = os.fstat(fd)
            owner = (self._status.st_uid, self._status.st_gid)
            if owner != (status.st_uid, status.st_gid):
                os.fchown(fd, *owner)
            os.fchmod(fd, stat.S_IMODE(self._status.st_mode))

        temporary = f".{self._name}.{os.urandom(8).hex()}"
        try:
            data = strictjson.dumps(config, ascii_only=False).encode()
            atomic_replace.replace(self._name, temporary, data, finish, self._dirfd)
        except UnicodeEncodeError as error:
            raise self.ambiguous("a lone surrogate") from error
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> BundleError:
        return BundleError(
            f'cannot replace "{self.path}": {error.strerror}',
            "make the bundle's directory writable for the runtime",
        )


def parse(data: bytes) -> tuple[OciConfig, str | None]:
    """Return the OCI config *data* and, if it must not be edited, the reason.

    Raises ValueError if *data* is not a JSON object. If it has too many values, it is not parsed.
    """
    # An upper limit of the number of values: strings may contain these characters as well.
    if len(data) > MAX_VALUES and sum(map(data.count, (b"[", b"{", b","))) > MAX_VALUES:
        return {}, f"more than {MAX_VALUES} values"
    doubts: list[str] = []
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        doubts.append(f"not valid UTF-8 at byte {error.start}")
        text = data.decode("utf-8", "surrogateescape")
    try:
        config = _loads(text, doubts)
    except RecursionError:
        return {}, "nested too deeply"
    if not isinstance(config, dict):
        raise ValueError("not an object")  # noqa: TRY004 (like invalid JSON)
    if _depth_exceeds(config, MAX_DEPTH):
        doubts.append(f"nested deeper than {MAX_DEPTH}")
    if not doubts:
        doubts += _shape_doubts(config) or _nul_doubts(config, text)
    return config, doubts[0] if doubts else None


def _loads(text: str, doubts: list[str]) -> Any:  # noqa: ANN401 (JSON)
    """Return the value of the JSON *text*; add what readers read differently to *doubts*."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen:
                    break
                seen.add(name)
            doubts.append(f'member "{name}" appears twice')
        return result

    def number(text: str) -> float:
        value = float(text)
        if value in (float("inf"), float("-inf")):
            doubts.append(f"the number {text[:20]} is out of range")
        return value

    def integer(text: str) -> int:
        try:
            return int(text)
        except ValueError:
            doubts.append(f"the number {text[:20]}... has {len(text)} digits")
            return 0

    return strictjson.loads(
        text, pairs=members, parse_int=integer, parse_float=number, parse_constant=_refuse
    )


def has_read_only_root(config: OciConfig) -> bool:
    """Return whether the root of the container of *config* is read-only."""
    root = config.get("root")
    return isinstance(root, dict) and root.get("readonly") is True


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a JSON number")


def _nul_doubts(config: OciConfig, source: str) -> list[str]:
    """Return a doubt if a string that we read in the valid *config* contains a NUL."""
    if "\\u0000" not in source:
        return []
    document: dict[str, Any] = config
    process, linux = document.get("process") or {}, document.get("linux") or {}
    pending: list[object] = [
        *(document.get(name) for name in ("hooks", "mounts", "root")),
        *(process.get("env"), process.get("args"), linux.get("devices")),
    ]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            if "\0" in item:
                return ["a string contains a NUL, where some readers end it"]
        elif isinstance(item, dict):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            pending += item
    return []


def _depth_exceeds(value: object, limit: int) -> bool:
    level: list[object] = [value]
    for _ in range(limit):
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True


def _shape_doubts(config: OciConfig) -> list[str]:
    """Return where the parts that we read or edit do not have the structure of an OCI config."""
    doubts = []
    for path, member_names in _OBJECTS.items():
        value: Any = config
        for part in path.split(".") if path else ():
            value = value.get(part) if isinstance(value, dict) else None
        if value is None:
            continue
        if not isinstance(value, dict):
            doubts.append(f"{path} is not an object")
            continue
        spelled = {name.casefold(): name for name in member_names}
        # Go matches the long s and the Kelvin sign as letters, too; in C a NUL ends a name.
        doubts += [
            f'member "{key}" is a misspelled "{spelled[_as_read(key)]}"'
            for key in value
            if key not in member_names and _as_read(key) in spelled
        ]
        doubts += [
            f"{path or 'config'}.{name} is not a list of objects"
            for name in _LISTS.get(path, ())
            if not _is_list_of_objects(value.get(name))
        ]
    return doubts or _item_doubts(config) or _value_doubts(config)


def _as_read(name: str) -> str:
    """Return *name* as the most tolerant reader reads it: until a NUL, without letter case."""
    return name.partition("\0")[0].casefold()


def _item_doubts(config: OciConfig) -> list[str]:
    """Return the misspelled members of the objects in the lists that we read."""
    document: dict[str, Any] = config
    linux = document.get("linux") or {}
    hooks = document.get("hooks") or {}
    lists = [
        *(document.get("mounts"), linux.get("devices"), linux.get("namespaces")),
        (linux.get("resources") or {}).get("devices"),
        *(hooks.get(name) for name in _OBJECTS["hooks"]),
    ]
    objects = [item for items in lists for item in items or ()]
    capabilities = (document.get("process") or {}).get("capabilities")
    if isinstance(capabilities, dict):
        objects.append(capabilities)
    return [
        f'member "{key}" is a misspelled "{_SPELLED[_as_read(key)]}"'
        for item in objects
        for key in item
        if key not in _READ and _as_read(key) in _SPELLED
    ]


def _value_doubts(config: OciConfig) -> list[str]:
    """Return the values that we read and that have a wrong type or range."""
    doubts = []
    process: dict[str, Any] = config.get("process") or {}
    environment = process.get("env")
    if environment is not None and not (
        isinstance(environment, list) and all(isinstance(item, str) for item in environment)
    ):
        doubts.append("process.env is not a list of strings")
    user: dict[str, Any] = process.get("user") or {}
    doubts += [
        f"process.user.{name} is not a user or group id"
        for name in ("uid", "gid")
        # True is an int to Python.
        if type(user.get(name, 0)) is not int or not 0 <= user.get(name, 0) < 2**32
    ]
    if not isinstance(user.get("additionalGids", []), (list, type(None))):
        doubts.append("process.user.additionalGids is not a list")
    doubts += [
        "a mount's destination is not a string"
        for mount in config.get("mounts") or ()
        if not isinstance(mount.get("destination", ""), str)
    ]
    return doubts


def _is_list_of_objects(value: object) -> bool:
    return value is None or (
        isinstance(value, list) and all(isinstance(item, dict) for item in value)
    )
