# SPDX-License-Identifier: Apache-2.0
"""Load spec directories: which file defines a device, and the edits that a request collects.

On the start path. Precedence, as in CDI SPEC.md and the reference library: a device of a later
directory silently replaces one of an earlier directory; two files of one directory that define the
same device conflict, and the name does not resolve. An unusable file is recorded; it hides no
other file.
"""

from __future__ import annotations

import os
import time

from cdi import document, quick, strictjson, trusted_open
from cdi.edits import merge
from cdi.errors import CdiError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

    from cdi.wire import Device, Edits, Spec

    Stamp = tuple[int, ...]

DEFAULT_DIRECTORIES = ("/etc/cdi", "/var/run/cdi")
MAX_SPEC_BYTES = 4 << 20
# Values in a document: a short text can hold many, and each takes some hundred bytes of memory.
MAX_VALUES = 200_000
ENDINGS = (".json", ".yaml")
# A file that changed this recently can change again and keep its time stamp.
_SETTLED_NS = 1_000_000_000


class SpecFile:
    """A file of a spec directory: its document, or the error for which it is refused.

    *priority* is the index of its directory; *devices* maps the names of its devices to them.
    """

    __slots__ = ("devices", "error", "path", "priority", "spec", "stamp")

    def __init__(self, path: str, priority: int) -> None:
        self.path = path
        self.priority = priority
        self.spec: Spec | None = None
        self.devices: dict[str, Device] = {}
        self.error: CdiError | None = None
        # The identity of the content that was read; None if it must be read again.
        self.stamp: Stamp | None = None

    def take(self, decoded: Any) -> None:  # noqa: ANN401 (JSON)
        """Check the document *decoded*, or record *decoded* as the error if it is a CdiError."""
        try:
            if isinstance(decoded, CdiError):
                raise decoded
            self.spec = document.check(decoded)
            self.devices = {device["name"]: device for device in self.spec["devices"]}
        except CdiError as error:
            self.error = error


class Registry:
    """The devices of some spec directories, in rising precedence.

    *may_trust* returns whether the owner and mode of a directory or file are acceptable.
    *decode_yaml* takes path → text of all files that are not strict JSON, in one call, and returns
    path → document, or a CdiError in its place. Without a `refresh` there are no devices.
    """

    def __init__(
        self,
        directories: Iterable[str] = DEFAULT_DIRECTORIES,
        *,
        may_trust: Callable[[os.stat_result], bool],
        decode_yaml: Callable[[dict[str, str]], dict[str, Any]],
    ) -> None:
        self.directories = tuple(os.path.normpath(d) for d in directories or DEFAULT_DIRECTORIES)
        self.files: list[SpecFile] = []
        self._may_trust = may_trust
        self._decode_yaml = decode_yaml
        self._by_kind: dict[str, list[SpecFile]] = {}
        # Kind → device → files, filled on the first look-up of a kind.
        self._defining: dict[str, dict[str, list[SpecFile]]] = {}

    def refresh(self) -> list[str]:
        """Scan the directories, read the files that changed since the last scan, return them."""
        earlier = {(file.priority, file.path): file for file in self.files}
        changed: list[str] = []
        files: list[SpecFile] = []
        texts: dict[str, str] = {}
        for priority, directory in enumerate(self.directories):
            for file in _scan(directory, priority, self._may_trust, earlier, texts):
                files.append(file)
                if earlier.pop((priority, file.path), None) is not file:
                    changed.append(file.path)
        decoded = self._decode_yaml(texts) if texts else {}
        for file in files:
            if file.spec is None and file.error is None:
                file.take(decoded[file.path])
        self.files = files
        self._by_kind = {}
        self._defining = {}
        for file in files:
            if file.spec is not None:
                self._by_kind.setdefault(file.spec["kind"], []).append(file)
        return changed + [path for _, path in earlier]

    def defining(self, name: str) -> list[SpecFile]:
        """Return the files that define the device *name*, in rising precedence."""
        kind, _, device = name.partition("=")
        if kind not in self._defining:
            index: dict[str, list[SpecFile]] = {}
            for file in self._by_kind.get(kind, ()):
                for defined in file.devices:
                    index.setdefault(defined, []).append(file)
            self._defining[kind] = index
        return self._defining[kind].get(device, [])

    def find(self, name: str) -> SpecFile | None:
        """Return the file whose definition of *name* counts; None if it does not resolve."""
        files = self.defining(name)
        # A conflict in any directory hides the name, even if a later one defines it once.
        if len({file.priority for file in files}) < len(files):
            return None
        return files[-1] if files else None

    @property
    def kinds(self) -> list[str]:
        """The kinds of all files that loaded, sorted."""
        return sorted(self._by_kind)

    def names(self, kind: str) -> list[str]:
        """Return the qualified names of *kind* that resolve, sorted."""
        devices = {device for file in self._by_kind.get(kind, ()) for device in file.devices}
        names = (f"{kind}={device}" for device in devices)
        return sorted(name for name in names if self.find(name) is not None)

    @property
    def devices(self) -> list[str]:
        """The qualified names that resolve, sorted."""
        return sorted(name for kind in self._by_kind for name in self.names(kind))

    @property
    def conflicting(self) -> list[str]:
        """The qualified names that do not resolve because two files of a directory define them."""
        return sorted({name for name, _, _ in self._conflicts()})

    @property
    def vendors(self) -> list[str]:
        """The vendors of all files that loaded, sorted."""
        return sorted({kind.partition("/")[0] for kind in self._by_kind})

    @property
    def classes(self) -> list[str]:
        """The classes of all files that loaded, sorted."""
        return sorted({kind.partition("/")[2] for kind in self._by_kind})

    @property
    def errors(self) -> dict[str, list[CdiError]]:
        """Path → the reasons why the file, or a device in it, cannot be used."""
        errors = {file.path: [file.error] for file in self.files if file.error is not None}
        for name, one, other in self._conflicts():
            text = f'"{name}" is also defined by "{other.path}"'
            errors.setdefault(one.path, []).append(CdiError("conflict", text))
        return errors

    def _conflicts(self) -> Iterator[tuple[str, SpecFile, SpecFile]]:
        """Yield name, file and other file of each conflict, once for either file.

        Of three files, the second and the third each conflict with the first.
        """
        for kind, files in self._by_kind.items():
            first: dict[tuple[int, str], SpecFile] = {}
            for later in files:
                for device in sorted(later.devices):
                    earlier = first.setdefault((later.priority, device), later)
                    if earlier is not later:
                        yield f"{kind}={device}", later, earlier
                        yield f"{kind}={device}", earlier, later

    def resolve(self, names: Iterable[str]) -> Edits:
        """Return the edits of the devices *names*, each file's own edits once, before its first.

        Raises CdiError "unresolvable", which names every device that is not defined.
        """
        files_by_name = [(name, self.find(name)) for name in names]
        missing = [name for name, file in files_by_name if file is None]
        if missing:
            raise CdiError("unresolvable", ", ".join(missing))
        parts: list[Edits] = []
        files: list[SpecFile] = []
        for name, file in files_by_name:
            assert file is not None
            assert file.spec is not None
            if file not in files:
                files.append(file)
                parts.append(file.spec.get("containerEdits") or {})
            parts.append(file.devices[name.partition("=")[2]]["containerEdits"])
        return merge(parts)

    def common_edits(self, kind: str) -> Edits | None:
        """Return the edits common to all devices of *kind*, or None if it has no device."""
        files = [
            file
            for file in self._by_kind.get(kind, ())
            if any(self.find(f"{kind}={device}") is file for device in file.devices)
        ]
        specs = [file.spec for file in files if file.spec is not None]
        return merge(spec.get("containerEdits") or {} for spec in specs) if specs else None


def load(
    directories: Iterable[str],
    *,
    may_trust: Callable[[os.stat_result], bool],
    decode_yaml: Callable[[dict[str, str]], dict[str, Any]],
) -> Registry:
    """Return the Registry of *directories*, read once."""
    registry = Registry(directories, may_trust=may_trust, decode_yaml=decode_yaml)
    registry.refresh()
    return registry


def decode_json(text: str) -> object:
    """Decode JSON; raise CdiError "duplicate-key", and ValueError for invalid JSON."""
    return strictjson.loads(text, pairs=_unique, parse_constant=_refuse)


def text_of(data: bytes) -> str:
    """Return the text of a spec file; raise CdiError if it is too long or not UTF-8."""
    if len(data) > MAX_SPEC_BYTES:
        raise CdiError("syntax", f"larger than {MAX_SPEC_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CdiError("syntax", f"not UTF-8 at byte {error.start}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names: set[str] = set()
        for twice, _ in pairs:
            if twice in names:
                break
            names.add(twice)
        raise CdiError("duplicate-key", f'member "{twice}" occurs more than once')
    return result


def _refuse(constant: str) -> None:
    """Raise ValueError for NaN and Infinity, which Python's decoder accepts and JSON does not."""
    raise ValueError(constant)


def _take_json(file: SpecFile, text: str) -> bool:
    """Set the document of *file* from the JSON *text*; return False if it must be read as YAML."""
    # All CDI readers read JSON as YAML, which has other escapes and line breaks in strings.
    if "\\" in text or not text.isascii() or "\x7f" in text:
        return False
    if len(text) > MAX_VALUES and sum(map(text.count, "[{,")) > MAX_VALUES:
        file.error = CdiError("syntax", f"more than {MAX_VALUES} values")
        return True
    try:
        spec = strictjson.loads(text)
        devices = quick.devices(text, spec)
        if devices is not None:
            file.spec, file.devices = spec, devices
        else:
            file.take(decode_json(text))
    except CdiError as error:
        file.error = error
    except ValueError:
        return False
    except RecursionError:
        file.error = CdiError("syntax", "nested too deeply")
    return True


def _scan(
    directory: str,
    priority: int,
    may_trust: Callable[[os.stat_result], bool],
    earlier: dict[tuple[int, str], SpecFile],
    texts: dict[str, str],
) -> Iterator[SpecFile]:
    """Yield the specs of *directory*, sorted by name; an unchanged one is that of *earlier*.

    The texts for the YAML decoder are added to *texts*; their files have no document or error yet.
    """
    try:
        dirfd = trusted_open.open_directory(directory, may_trust)
    except CdiError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            failed = SpecFile(directory, priority)
            failed.error = error
            yield failed
        return
    try:
        for name in sorted(os.listdir(dirfd)):
            if name.endswith(ENDINGS):
                path = f"{directory}/{name}"
                old = earlier.get((priority, path))
                if old is not None and old.stamp is not None and old.stamp == _stamp(name, dirfd):
                    yield old
                    continue
                file = SpecFile(path, priority)
                try:
                    text = _read(file, name, dirfd, may_trust)
                except CdiError as error:
                    file.error = error
                    yield file
                    continue
                if text is None:
                    continue
                if not (name.endswith(".json") and _take_json(file, text)):
                    texts[path] = text
                yield file
    finally:
        os.close(dirfd)


def _stamp(name: str, dirfd: int) -> Stamp | None:
    try:
        return _identity(os.stat(name, dir_fd=dirfd))
    except OSError:
        return None


def _identity(status: os.stat_result) -> Stamp:
    """Return values that change with the content, owner or mode of a file."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _read(
    file: SpecFile, name: str, dirfd: int, may_trust: Callable[[os.stat_result], bool]
) -> str | None:
    """Return the text of a CDI spec, None for a directory; raise CdiError for anything else."""
    opened = trusted_open.open_file(name, dirfd, may_trust)
    if opened is None:
        return None
    fd, status = opened
    try:
        if is_settled(max(status.st_mtime_ns, status.st_ctime_ns), time.time_ns()):
            file.stamp = _identity(status)
        data = b""
        while len(data) <= MAX_SPEC_BYTES:
            chunk = os.read(fd, min(status.st_size, MAX_SPEC_BYTES) + 1)
            if not chunk:
                break
            data += chunk
    except OSError as error:
        raise CdiError("syntax", f"read: {error.strerror}") from error
    finally:
        os.close(fd)
    return text_of(data)


def is_settled(changed_ns: int, now_ns: int) -> bool:
    """Return whether a further change would give another time stamp than *changed_ns*."""
    return now_ns - changed_ns > _SETTLED_NS
