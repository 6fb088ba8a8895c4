# SPDX-License-Identifier: Apache-2.0
"""Read the OCI state from stdin, and find the bundle and the container's root.

OCI runtime.md, "State". The state's pid is not used: in a createContainer hook it is a number of
the container's pid namespace (1 with runc, 0 with crun) while /proc is the host's.
"""

from __future__ import annotations

import _stat as stat
import posix as os

from cdi import strictjson
from cdi.pathnames import join, normpath
from gpuruntime.errors import BundleError
from gpuruntime.oci.bundle import Bundle
from gpuruntime.system.paths import Root
from gpuruntime.system.text import encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from cdi.wire import OciConfig

MAX_STATE_BYTES = 1 << 20
_HINT = "let an OCI runtime call this hook; it is not a command for people"


def open_state(path: str) -> int:
    """Return a descriptor of the state in the host's file *path*, "-" for standard input.

    Raises BundleError for anything but a regular file.
    """
    if path == "-":
        return 0
    why = "not an absolute path"
    if _is_plain(path):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            why = error.strerror or str(error)
        else:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return fd
            why = "not a regular file"
    raise BundleError(
        f'cannot read the state in "{path}": {why}', "name a file with the OCI state, or -"
    )


def read_bundle(stdin: int) -> str:
    """Return the bundle's path from the state on descriptor *stdin*; raise BundleError."""
    return bundle_of(read_document(stdin))


def read_document(stdin: int) -> dict[str, Any]:
    """Return the state on descriptor *stdin*; raise BundleError for anything but a JSON object."""
    data = b""
    try:
        while len(data) <= MAX_STATE_BYTES:
            chunk = os.read(stdin, MAX_STATE_BYTES)
            if not chunk:
                break
            data += chunk
    except OSError as error:
        raise BundleError(f"cannot read the state on standard input: {error}", _HINT) from error
    if len(data) > MAX_STATE_BYTES:
        raise BundleError(f"the state on standard input has over {MAX_STATE_BYTES} bytes", _HINT)
    try:
        document = strictjson.loads(data, pairs=_members)
    except (ValueError, RecursionError) as error:
        raise BundleError(
            f"the state on standard input is not valid JSON: {error}", _HINT
        ) from error
    return document if isinstance(document, dict) else {}


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a member is there twice")
    return members


def bundle_of(document: dict[str, Any]) -> str:
    """Return the bundle's path, also of a state before OCI 1.0; raise BundleError."""
    bundle = document.get("bundle", document.get("bundlePath"))
    if not isinstance(bundle, str) or not _is_plain(bundle):
        raise BundleError(
            f"the state on standard input names no bundle by an absolute path: {bundle!r}", _HINT
        )
    return bundle


def open_root(bundle: str) -> Root:
    """Return the root of the container in *bundle*; raise BundleError as `open_container`."""
    return open_container(bundle)[1]


def open_container(bundle: str) -> tuple[OciConfig, Root]:
    """Return the config of the container in *bundle*, and its root, opened for all that follows.

    Raises BundleError if config.json names none that can be a container's.
    """
    document, doubt = Bundle(bundle).parse()
    root = document.get("root")
    path = root.get("path") if isinstance(root, dict) else None
    if doubt is not None or not isinstance(path, str) or not path or "\0" in path:
        raise _unusable(bundle, doubt or "no root.path")
    host_path = join(bundle, path)
    if not _is_plain(host_path):
        raise _unusable(bundle, f'root.path is "{path}"')
    try:
        # As a path that ends in a slash, a link would be followed.
        opened = Root(normpath(host_path))
    except OSError as error:
        raise _unusable(bundle, f'root.path "{path}": {error.strerror}') from error
    if opened.is_host_root():
        raise _unusable(bundle, f'root.path "{path}" is the root of the host')
    return document, opened


def _is_plain(path: str) -> bool:
    """Return whether *path* is absolute, without `..` and NUL, and not the root itself."""
    return (
        path.startswith("/")
        and _is_of_bytes(path)
        and ".." not in path.split("/")
        and normpath(path) not in ("/", "//")
    )


def _is_of_bytes(path: str) -> bool:
    """Return whether *path*, out of JSON, can name a file: half a surrogate pair cannot."""
    try:
        return b"\0" not in encode(path)
    except UnicodeEncodeError:
        return False


def _unusable(bundle: str, why: str) -> BundleError:
    return BundleError(
        f'the config.json of "{bundle}" has no root that can be used: {why}',
        "give the container a root file system of its own",
    )
