# SPDX-License-Identifier: Apache-2.0
"""Spec directories → devices: which file defines a name, and the edits that a request collects.

On the start path. Precedence, as CDI SPEC.md and the reference library have it: a later directory
replaces an earlier one silently; two files of one directory that define the same device conflict,
and the name resolves nowhere. A file that cannot be used is recorded and hides no other.
"""

from __future__ import annotations

import json
import os
import stat

from cdi import document
from cdi.edits import merge
from cdi.errors import CdiError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from cdi.wire import Device, Edits, Spec

MAX_SPEC_BYTES = 16 << 20
_ENDINGS = (".json", ".yaml")


class Registry:
    """The devices of some spec directories.

    `errors` maps a path to the reasons why it, or a device in it, cannot be used.
    """

    def __init__(self) -> None:
        self.devices: dict[str, tuple[Spec, Device]] = {}
        self.errors: dict[str, list[str]] = {}

    def resolve(self, names: Iterable[str]) -> Edits:
        """Return the edits of the devices *names*, each file's own edits once, before its first.

        Raises CdiError "unresolvable" that names every device which is not defined.
        """
        names = list(names)
        missing = [name for name in names if name not in self.devices]
        if missing:
            raise CdiError("unresolvable", ", ".join(missing))
        parts: list[Edits] = []
        specs: list[Spec] = []
        for name in names:
            spec, device = self.devices[name]
            if not any(spec is other for other in specs):
                specs.append(spec)
                parts.append(spec.get("containerEdits") or {})
            parts.append(device["containerEdits"])
        return merge(parts)

    def common_edits(self, kind: str) -> Edits | None:
        """Return the edits of *kind* without any device, or None if no device is of it."""
        specs: list[Spec] = []
        for spec, _ in self.devices.values():
            if spec["kind"] == kind and not any(spec is other for other in specs):
                specs.append(spec)
        return merge(spec.get("containerEdits") or {} for spec in specs) if specs else None


def load(
    directories: Iterable[str],
    *,
    may_trust: Callable[[os.stat_result], bool],
    decode_yaml: Callable[[dict[str, str]], dict[str, Any]],
) -> Registry:
    """Load the `.json` and `.yaml` files of *directories*, in rising precedence.

    *may_trust* decides over the ownership of each directory and file. *decode_yaml* takes
    path → text of everything that is no strict JSON, in one call, and returns path → document,
    or a CdiError in its place.
    """
    registry = Registry()
    documents: list[tuple[int, str, Any]] = []
    texts: dict[str, str] = {}
    for priority, directory in enumerate(directories):
        for path, read in _read_directory(os.path.normpath(directory), may_trust):
            found = _decode_json(read, path, texts) if isinstance(read, str) else read
            documents.append((priority, path, found))
    decoded = decode_yaml(texts) if texts else {}
    found_in: dict[str, tuple[int, str]] = {}
    conflicts: set[str] = set()
    for priority, path, found in documents:
        try:
            spec = _checked(decoded.get(path, found))
        except CdiError as error:
            registry.errors.setdefault(path, []).append(f"{error.category}: {error}")
            continue
        for device in spec["devices"]:
            name = f"{spec['kind']}={device['name']}"
            known = found_in.get(name)
            if known and known[0] == priority:
                conflicts.add(name)
                for one, other in ((path, known[1]), (known[1], path)):
                    text = f'conflict: "{name}" is also defined by "{other}"'
                    registry.errors.setdefault(one, []).append(text)
                continue
            found_in[name] = (priority, path)
            registry.devices[name] = (spec, device)
    for name in conflicts:
        del registry.devices[name]
    return registry


def _checked(found: object) -> Spec:
    if isinstance(found, CdiError):
        raise found
    return document.check(found)


def _decode_json(text: str, path: str, texts: dict[str, str]) -> object:
    """Return the document of strict JSON *text*; anything else is left for YAML in *texts*."""
    if path.endswith(".json"):
        try:
            return decode_json(text)
        except CdiError as error:
            return error
        except ValueError:
            pass
        except RecursionError:
            return CdiError("syntax", "nested too deeply")
    texts[path] = text
    return None


def decode_json(text: str) -> object:
    """Decode JSON; raise CdiError "duplicate-key", and ValueError for what is no JSON."""
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise CdiError("duplicate-key", f'member "{twice}" is there twice')
    return result


def _read_directory(
    directory: str, may_trust: Callable[[os.stat_result], bool]
) -> Iterable[tuple[str, str | CdiError]]:
    """Yield (path, text or the reason why there is none) of each spec file, sorted by name."""
    try:
        dirfd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        yield directory, CdiError("syntax", f"open: {error.strerror}")
        return
    try:
        if not may_trust(os.fstat(dirfd)):
            yield directory, CdiError("untrusted", "the directory is not root's alone to write")
            return
        for name in sorted(os.listdir(dirfd)):
            if name.endswith(_ENDINGS):
                path = f"{directory}/{name}"
                try:
                    text = _read_file(name, dirfd, may_trust)
                except CdiError as error:
                    yield path, error
                else:
                    if text is not None:
                        yield path, text
    finally:
        os.close(dirfd)


def _read_file(name: str, dirfd: int, may_trust: Callable[[os.stat_result], bool]) -> str | None:
    """Return the text of a spec file, None for a directory; raise CdiError for anything odd."""
    try:
        # O_NONBLOCK: a FIFO planted here must not hang every container start of the node.
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dirfd)
    except OSError as error:
        raise CdiError("syntax", f"open: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            return None
        if not stat.S_ISREG(status.st_mode):
            raise CdiError("syntax", "not a regular file")
        if not may_trust(status):
            raise CdiError("untrusted", "the file is not root's alone to write")
        if status.st_size > MAX_SPEC_BYTES:
            raise CdiError("syntax", f"larger than {MAX_SPEC_BYTES} bytes")
        data = b""
        while len(data) <= MAX_SPEC_BYTES:
            chunk = os.read(fd, MAX_SPEC_BYTES)
            if not chunk:
                break
            data += chunk
    except OSError as error:
        raise CdiError("syntax", f"read: {error.strerror}") from error
    finally:
        os.close(fd)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CdiError("syntax", f"no UTF-8 at byte {error.start}") from error
