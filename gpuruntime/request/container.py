# SPDX-License-Identifier: Apache-2.0
"""The parts of an OCI config that can request something: variables, mounts, privilege; pure.

On the start path. Text of an image or a pod is data here, never a path or a pattern.
"""

from __future__ import annotations

from cdi import pathnames
from gpuruntime.errors import RequestError
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdi.wire import OciConfig
    from gpuruntime.config import Config

# A mount of /dev/null below this directory requests what the rest of its destination names.
MOUNT_ROOT = "/var/run/nvidia-container-devices"
MAX_VALUE_CHARS = 64 << 10
_MAX_NAME_CHARS = 64
_MAX_NAMES = 8
_ACCEPT = "accept-nvidia-visible-devices"
# The types of bind mounts, as engines write them; absent or null is "".
_BIND_TYPES = ("", "bind", "rbind", "none")


class Ignored(Record):
    """A request of a container that is not honoured, and why."""

    __slots__ = ("what", "why")

    def __init__(self, what: str, why: str) -> None:
        self.what = what
        self.why = why

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


class Container:
    """The parts of an OCI config that may request something, under the operator's config.

    *ignored* collects the requests that are not honoured. *malformed* says which is the first
    entry of the environment without "=", None if all have one.
    """

    def __init__(self, document: OciConfig, config: Config) -> None:
        self.document = document
        self.config = config
        self.ignored: list[Ignored] = []
        self.malformed: str | None = None
        self.environment = self._read_environment()
        self.is_privileged = _is_privileged(document)
        self.may_use_variables = config.accept_environment or self.is_privileged
        # An image of a CUDA version before 8, or one that is built like those.
        self.is_old_image = bool(
            self.value("CUDA_VERSION") and not self.value("NVIDIA_REQUIRE_CUDA")
        )

    def _read_environment(self) -> dict[str, str]:
        """Return the container's variables; the last of repeated ones counts, as for runc."""
        variables = {}
        entries = (self.document.get("process") or {}).get("env") or ()
        for i, entry in enumerate(entries):
            name, equals, value = entry.partition("=")
            if equals:
                variables[name] = value
            elif self.malformed is None:
                # Its position, not its text: it may be the second line of a secret.
                self.malformed = f"process.env[{i}], of {len(entry)} characters"
        return variables

    def value(self, name: str) -> str:
        """Return the value of the variable *name*, "" if it is not set; raise RequestError."""
        return checked(self.environment.get(name, ""), name)

    def words(self, name: str) -> list[str]:
        """Return the words of the variable *name*, a list with commas; raise RequestError."""
        return words(self.value(name))

    def mount_names(self, *, are_bound: bool = True) -> list[str]:
        """Return the names that bind mounts of /dev/null below MOUNT_ROOT request.

        If not *are_bound*, those of mounts of other types instead. Raises RequestError.
        """
        requested = []
        for mount in self.document.get("mounts") or ():
            source = mount.get("source")
            if not isinstance(source, str) or _cleaned(source) != "/dev/null":
                continue
            place = _cleaned(mount.get("destination") or "")
            is_bound = (mount.get("type") or "") in _BIND_TYPES
            if is_bound == are_bound and place.startswith(f"{MOUNT_ROOT}/"):
                name = place[len(MOUNT_ROOT) :].strip("/")
                requested.append(checked(name, "a mount's destination"))
        return requested

    def ignore(self, where: str, what: Iterable[str], why: str) -> None:
        """Note that *what*, which *where* requests, is not honoured, and *why*."""
        self.ignored.append(Ignored(f"{shortened(where)} {shown(what)}", why))

    def ignore_unprivileged(self, variable: str, what: Iterable[str]) -> None:
        """Note that *variable* is not honoured because of the operator's policy."""
        why = f'"{_ACCEPT}-envvar-when-unprivileged" does not allow it here'
        self.ignore(f"in an unprivileged container {variable}", what, why)

    def ignore_mounts(self, what: Iterable[str]) -> None:
        """Note that mounts are not honoured because of the operator's policy."""
        self.ignore("mounts", what, f'"{_ACCEPT}-as-volume-mounts" does not allow it')


def words(value: str) -> list[str]:
    """Return the words of the comma-separated list *value*, without blanks around them."""
    return [word for word in (part.strip() for part in value.split(",")) if word]


def shortened(text: str) -> str:
    """Return *text*, shortened to the length of a long name."""
    return text if len(text) <= _MAX_NAME_CHARS else f"{text[:_MAX_NAME_CHARS]}..."


def shown(what: Iterable[str]) -> str:
    """Return the first names of *what*, which an image wrote, for a message."""
    texts = list(what)
    more = f" and {len(texts) - _MAX_NAMES} more" if len(texts) > _MAX_NAMES else ""
    return ", ".join(f'"{shortened(text)}"' for text in texts[:_MAX_NAMES]) + more


def checked(value: str, where: str) -> str:
    """Return *value*; raise RequestError if it is too long."""
    if len(value) > MAX_VALUE_CHARS:
        raise RequestError(
            f"{shortened(where)} has {len(value)} characters",
            f'use at most {MAX_VALUE_CHARS} characters: name devices by index, or use "all"',
        )
    return value


def _cleaned(path: str) -> str:
    """Return *path* normalised, with one leading slash even where POSIX keeps two."""
    normal = pathnames.normpath(path or ".")
    return normal[1:] if normal.startswith("//") else normal


def _is_privileged(document: OciConfig) -> bool:
    """Return whether CAP_SYS_ADMIN is in the bounding set of the container."""
    sets = (document.get("process") or {}).get("capabilities")
    bounding = sets.get("bounding") if isinstance(sets, dict) else None
    return isinstance(bounding, list) and "CAP_SYS_ADMIN" in bounding
