# SPDX-License-Identifier: Apache-2.0
"""The parts of an OCI config that can request something: variables, mounts, privilege; pure.

On the start path. What an image or a pod wrote is data here, never a path or a pattern.
"""

from __future__ import annotations

import posixpath

from gpuruntime.errors import RequestError
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdi.wire import OciConfig
    from gpuruntime.config import Config

# A mount of /dev/null below here asks for what the rest of its destination names.
MOUNT_ROOT = "/var/run/nvidia-container-devices"
MAX_VALUE_CHARS = 64 << 10
_MAX_NAME_CHARS = 64
_MAX_NAMES = 8
_ACCEPT = "accept-nvidia-visible-devices"
# Of a mount that is a bind mount, as engines write it; absent or null is "".
_BIND_TYPES = ("", "bind", "rbind", "none")


class Ignored(Record):
    """Something that a container asks for and that does not count, and why."""

    __slots__ = ("what", "why")

    def __init__(self, what: str, why: str) -> None:
        self.what = what
        self.why = why

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


class Container:
    """What may ask in an OCI config, under the operator's config; collects what does not count.

    *malformed* says which entry of the environment is none, the first of them, or is None.
    """

    def __init__(self, document: OciConfig, config: Config) -> None:
        self.document = document
        self.config = config
        self.ignored: list[Ignored] = []
        self.malformed: str | None = None
        self.environment = self._read_environment()
        self.is_privileged = _is_privileged(document)
        self.may_use_variables = config.accept_environment or self.is_privileged
        # Of a CUDA before 8, or made as such images were.
        self.is_old_image = bool(
            self.value("CUDA_VERSION") and not self.value("NVIDIA_REQUIRE_CUDA")
        )

    def _read_environment(self) -> dict[str, str]:
        """Return the container's variables; of repeats the last counts, as with runc."""
        found = {}
        entries = (self.document.get("process") or {}).get("env") or ()
        for i, entry in enumerate(entries):
            name, equals, value = entry.partition("=")
            if equals:
                found[name] = value
            elif self.malformed is None:
                # Not what it is: it may be the second line of a secret.
                self.malformed = f"process.env[{i}], of {len(entry)} characters"
        return found

    def value(self, name: str) -> str:
        """Return the value of the variable *name*, "" if it is not set; raise RequestError."""
        return checked(self.environment.get(name, ""), name)

    def words(self, name: str) -> list[str]:
        """Return the words of the variable *name*, which is a list with commas."""
        return words(self.value(name))

    def mount_names(self, *, are_bound: bool = True) -> list[str]:
        """Return what bind mounts of /dev/null below MOUNT_ROOT name; raise RequestError.

        If not *are_bound*, what mounts of another type name there instead.
        """
        found = []
        for mount in self.document.get("mounts") or ():
            source = mount.get("source")
            if not isinstance(source, str) or _cleaned(source) != "/dev/null":
                continue
            place = _cleaned(mount.get("destination") or "")
            is_bound = (mount.get("type") or "") in _BIND_TYPES
            if is_bound == are_bound and place.startswith(f"{MOUNT_ROOT}/"):
                name = place[len(MOUNT_ROOT) :].strip("/")
                found.append(checked(name, "a mount's destination"))
        return found

    def ignore(self, where: str, what: Iterable[str], why: str) -> None:
        """Note that *what*, which *where* asks for, does not count, and *why*."""
        self.ignored.append(Ignored(f"{shortened(where)} {shown(what)}", why))

    def ignore_unprivileged(self, variable: str, what: Iterable[str]) -> None:
        """Note that *variable* does not count because of the operator's policy."""
        why = f'"{_ACCEPT}-envvar-when-unprivileged" does not allow it here'
        self.ignore(f"in an unprivileged container {variable}", what, why)

    def ignore_mounts(self, what: Iterable[str]) -> None:
        """Note that mounts do not count because of the operator's policy."""
        self.ignore("mounts", what, f'"{_ACCEPT}-as-volume-mounts" does not allow it')


def words(value: str) -> list[str]:
    """Return the words of a list with commas, without blanks around them."""
    return [word for word in (part.strip() for part in value.split(",")) if word]


def shortened(text: str) -> str:
    """Return *text*, cut where it is longer than a name."""
    return text if len(text) <= _MAX_NAME_CHARS else f"{text[:_MAX_NAME_CHARS]}..."


def shown(what: Iterable[str]) -> str:
    """Return the first of names that an image wrote, for a message."""
    found = list(what)
    more = f" and {len(found) - _MAX_NAMES} more" if len(found) > _MAX_NAMES else ""
    return ", ".join(f'"{shortened(name)}"' for name in found[:_MAX_NAMES]) + more


def checked(value: str, where: str) -> str:
    """Return *value*; raise RequestError if it is longer than anybody needs."""
    if len(value) > MAX_VALUE_CHARS:
        raise RequestError(
            f"{shortened(where)} has {len(value)} characters",
            f"make do with {MAX_VALUE_CHARS}; devices can be named by index, or all at once",
        )
    return value


def _cleaned(path: str) -> str:
    """Return *path* without what means nothing; POSIX lets two leading slashes mean something."""
    found = posixpath.normpath(path or ".")
    return found[1:] if found.startswith("//") else found


def _is_privileged(document: OciConfig) -> bool:
    """Return whether the container has CAP_SYS_ADMIN to lose."""
    found = (document.get("process") or {}).get("capabilities")
    bounding = found.get("bounding") if isinstance(found, dict) else None
    return isinstance(bounding, list) and "CAP_SYS_ADMIN" in bounding
