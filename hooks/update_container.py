# SPDX-License-Identifier: Apache-2.0
"""The one hook of our CDI specs: its arguments → the operations in the container's root; pure."""

from __future__ import annotations

from cdi.pathnames import basename, dirname
from gpuruntime.formats import ldcache_merge
from gpuruntime.system.clean_names import LINK_PATH, is_clean, is_clean_name
from gpuruntime.system.compat import DEFAULT_ROOT, CudaCompat
from gpuruntime.system.loader import LoaderCache
from gpuruntime.system.ops import (
    ApplicationProfile,
    Chmod,
    DeviceLink,
    Link,
    MaskParams,
    RootIsMount,
)
from hooks.options import last, parse, parse_mode, refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuruntime.system.operation import Operation
    from hooks.options import OptionValues

NAME = "update-container"
VALUES = frozenset(
    (
        *("chmod", "cuda-compat", "cuda-compat-cuda", "cuda-compat-root", "device-link"),
        *("ldconfig-mode", "ldconfig-path", "library", "link"),
    )
)
SWITCHES = frozenset(("ahead", "application-profile", "mask-params"))
MERGE, HOST, NONE = _MODES = ("merge", "host", "none")
DEFAULT_LDCONFIG = "/sbin/ldconfig"
_MAX_VERSION_CHARS = 40


def read(arguments: Sequence[str]) -> OptionValues:
    """Return the options in *arguments*; raise RequestError.

    --link TARGET::LINK            make LINK a link to TARGET
    --device-link TARGET::LINK     the same, if there is a TARGET
    --cuda-compat VERSION          prefer the image's CUDA where it is right for this driver
    --cuda-compat-cuda VERSION     the same, where the driver is known by its CUDA version
    --cuda-compat-root DIRECTORY   where the image has its CUDA, for --cuda-compat-cuda
    --library SONAME::PATH::ABI    let the loader find SONAME at PATH
    --ldconfig-mode MODE           "merge"; "host" to run that ldconfig where the image's cache
                                   cannot be merged with; "none": leave the loader's files alone
    --ldconfig-path PATH           the ldconfig of the host, /sbin/ldconfig by default
    --mask-params                  hide that the driver may make device nodes
    --application-profile          tell the driver's libraries which GPUs there are
    --chmod MODE::PATH             change the permissions of PATH, if it is there
    --ahead                        before the container has its mounts: of these, links and the
                                   loader's files, and nothing where the root is not mounted
    """
    return parse(NAME, arguments, VALUES, SWITCHES)


def plan(option_values: OptionValues) -> list[Operation]:
    """Return the operations that *option_values* request, in their order; raise RequestError."""
    is_ahead = "ahead" in option_values
    links = [_link(value, Link) for value in option_values.get("link", ())]
    if not is_ahead:
        links += [_link(value, DeviceLink) for value in option_values.get("device-link", ())]
    # By what they say: to compare the records themselves takes longer.
    once = {(type(link), link.path, link.target): link for link in links}
    operations: list[Operation] = [*([RootIsMount()] if is_ahead else ()), *once.values()]
    entries = [_entry(value) for value in option_values.get("library", ())]
    entries += _linked_entries(links, entries)
    compat = _compat(option_values)
    mode = last(option_values, "ldconfig-mode", MERGE)
    if mode not in _MODES:
        raise refused(NAME, mode, f"is none of {', '.join(_MODES)}")
    if mode != NONE:
        if entries:
            ldconfig = (
                last(option_values, "ldconfig-path", DEFAULT_LDCONFIG) if mode == HOST else ""
            )
            operations.append(
                LoaderCache(tuple(entries), compat, ldconfig, may_cover=not is_ahead)
            )
        elif compat:
            operations.append(compat)
    if is_ahead:
        return operations
    if "mask-params" in option_values:
        operations.append(MaskParams())
    if "application-profile" in option_values:
        operations.append(ApplicationProfile())
    operations += [_chmod(value) for value in option_values.get("chmod", ())]
    return operations


def _link(value: str, kind: type[Link]) -> Link:
    target, _, path = value.partition("::")
    below = target
    while below.startswith("../"):
        below = below[len("../") :]
    if not is_clean(f"/{below}") or not is_clean(path, LINK_PATH) or "::" in path:
        raise refused(NAME, value, "is not TARGET::LINK, a relative and an absolute path")
    return kind(path, target)


def _entry(value: str) -> ldcache_merge.CacheEntry:
    soname, _, rest = value.partition("::")
    path, _, abi = rest.partition("::")
    if not is_clean_name(soname) or not is_clean(path) or abi not in ldcache_merge.ABI_FLAGS:
        raise refused(NAME, value, "is not SONAME::PATH::ABI")
    # The SONAME link, not the file: then a later ldconfig comes to the same result.
    return ldcache_merge.CacheEntry(
        soname, f"{dirname(path)}/{soname}", ldcache_merge.ABI_FLAGS[abi]
    )


def _linked_entries(
    links: list[Link], entries: list[ldcache_merge.CacheEntry]
) -> list[ldcache_merge.CacheEntry]:
    """Return an entry for each `.so` link to a library: programs open them by that name too."""
    by_place = {entry.path: entry for entry in entries}
    linked = []
    for link in links:
        target = by_place.get(f"{dirname(link.path)}/{link.target}")
        if target is not None and link.path not in by_place:
            linked.append(ldcache_merge.CacheEntry(basename(link.path), link.path, target.flags))
    return linked


def _compat(option_values: OptionValues) -> CudaCompat | None:
    version = last(option_values, "cuda-compat")
    cuda = last(option_values, "cuda-compat-cuda")
    if version:
        return CudaCompat(_version(version, "driver"))
    if not cuda:
        return None
    directory = last(option_values, "cuda-compat-root", DEFAULT_ROOT)
    if not is_clean(directory):
        raise refused(NAME, directory, "is not a plain absolute path")
    return CudaCompat("", _version(cuda, "CUDA"), directory)


def _version(text: str, what: str) -> str:
    numbers = text.split(".")
    if len(text) > _MAX_VERSION_CHARS or not all(n.isascii() and n.isdigit() for n in numbers):
        raise refused(NAME, text, f"is not a {what} version")
    return text


def _chmod(value: str) -> Chmod:
    text, _, path = value.partition("::")
    mode = parse_mode(text)
    if mode is None or not is_clean(path):
        raise refused(NAME, value, "is not MODE::PATH, an octal number and an absolute path")
    return Chmod(path, mode)
