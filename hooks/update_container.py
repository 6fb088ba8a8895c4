# SPDX-License-Identifier: Apache-2.0
"""The one hook of our CDI specs: its arguments → the operations in the container's root; pure."""

from __future__ import annotations

import posixpath
import re

from gpuruntime import ldcache
from gpuruntime.errors import RequestError
from gpuruntime.system.ops import DeviceLink, Link, LoaderCache, MaskParams

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Union

    Operation = Union[Link, LoaderCache, MaskParams]

NAME = "update-container"
# Nothing else reaches ld.so.conf, a link or the cache.
_PATH = re.compile(r"(?:/[A-Za-z0-9_.+~@-]+)+\Z")
# The by-path names of device nodes have colons, which separate directories in ld.so.conf.
_LINK_PATH = re.compile(r"(?:/[A-Za-z0-9_.+~@:-]+)+\Z")
_FILE_NAME = re.compile(r"[A-Za-z0-9_.+~@-]+\Z")
_TARGET = re.compile(r"(?:\.\./)*((?:[A-Za-z0-9_.+~@-]+/)*[A-Za-z0-9_.+~@-]+)\Z")


def plan(arguments: Sequence[str]) -> list[Operation]:
    """Return the operations that *arguments* ask for; raise RequestError.

    --link TARGET::LINK            make LINK a link to TARGET
    --device-link TARGET::LINK     the same, if there is a TARGET
    --library SONAME::PATH::ABI    let the loader find SONAME at PATH
    --mask-params                  hide that the driver may make device nodes
    """
    links: list[Link] = []
    entries: list[ldcache.Entry] = []
    mask: list[MaskParams] = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name == "--mask-params" and not equals:
            mask = [MaskParams()]
            continue
        if name not in ("--link", "--device-link", "--library"):
            raise _refused(word, "is no option")
        if not equals:
            value = next(words, "")
        if name == "--link":
            links.append(_link(value, Link))
        elif name == "--device-link":
            links.append(_link(value, DeviceLink))
        else:
            entries.append(_entry(value))
    entries += _linked_entries(links, entries)
    cache = [LoaderCache(tuple(entries))] if entries else []
    return [*dict.fromkeys(links), *cache, *mask]


def _link(value: str, kind: type[Link]) -> Link:
    target, _, path = value.partition("::")
    found = _TARGET.match(target)
    if not found or not is_clean(f"/{found[1]}") or not is_clean(path, _LINK_PATH):
        raise _refused(value, "is not TARGET::LINK, a relative and an absolute path")
    return kind(path, target)


def _entry(value: str) -> ldcache.Entry:
    soname, _, rest = value.partition("::")
    path, _, abi = rest.partition("::")
    if not _FILE_NAME.match(soname) or not is_clean(path) or abi not in ldcache.ABI_FLAGS:
        raise _refused(value, "is not SONAME::PATH::ABI")
    # The SONAME link, not the file: then a later ldconfig comes to the same result.
    return ldcache.Entry(soname, f"{posixpath.dirname(path)}/{soname}", ldcache.ABI_FLAGS[abi])


def _linked_entries(links: list[Link], entries: list[ldcache.Entry]) -> list[ldcache.Entry]:
    """Return an entry for each `.so` link to a library: programs open them by that name too."""
    by_place = {entry.path: entry for entry in entries}
    found = []
    for link in links:
        target = by_place.get(f"{posixpath.dirname(link.path)}/{link.target}")
        if target is not None and link.path not in by_place:
            found.append(ldcache.Entry(posixpath.basename(link.path), link.path, target.flags))
    return found


def is_clean(path: str, pattern: re.Pattern[str] = _PATH) -> bool:
    """Tell whether *path* is absolute, and of names that nothing in its way takes for more."""
    return pattern.match(path) is not None and not {".", ".."} & set(path.split("/"))


def _refused(value: str, why: str) -> RequestError:
    return RequestError(
        f'{NAME}: "{value}" {why}', 'write the CDI spec again with "gpuruntime cdi generate"'
    )
