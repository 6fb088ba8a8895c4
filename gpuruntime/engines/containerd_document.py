# SPDX-License-Identifier: Apache-2.0
"""The settings in a containerd config or drop-in of version 1, 2 or 3; pure.

Before 2.1, containerd takes the table of a plugin from the last file that has it, so a drop-in
must contain a copy of the whole table.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from gpuruntime.engines.document_edits import Edit, Path, check_spelling, look_up, put, table_at
from gpuruntime.engines.errors import BadFileError
from gpuruntime.engines.runtime_entry import RuntimeEntry, candidates

RUNTIME_TYPE = "io.containerd.runc.v2"
# The version of a new config file: every containerd since 1.2 reads it.
NEW_VERSION = 2
_PLUGINS = {1: "cri", 2: "io.containerd.grpc.v1.cri"}
_PLUGIN = "io.containerd.cri.v1.runtime"
_BARE_RUNTIME = {
    "privileged_without_host_devices": False,
    "runtime_engine": "",
    "runtime_root": "",
    "runtime_type": RUNTIME_TYPE,
}


# The runtime that containerd provides, as its default, if none is configured.
_RUNC = {"runtime_type": RUNTIME_TYPE}


def version_of(document: Mapping[str, Any]) -> int:
    """Return the version of a config; raise BadFileError if it is not valid."""
    check_spelling(document, (("version",), ("imports",), ("plugins",)))
    if not document:
        return NEW_VERSION
    version = document.get("version", 1)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise BadFileError('has a "version" that is not a positive integer', "correct it")
    return version


def plugin_path(version: int) -> Path:
    """Return the path of the CRI plugin's settings in a config of *version*."""
    return ("plugins", _PLUGINS.get(version, _PLUGIN))


def cri_settings(document: Mapping[str, Any], version: int) -> dict[str, Any]:
    """Return the CRI plugin's settings in *document*; raise BadFileError if not a table."""
    base = plugin_path(version)
    containerd = (*base, "containerd")
    keys = ((*containerd, "runtimes"), (*containerd, "default_runtime_name"))
    check_spelling(document, (*keys, (*base, "enable_cdi")))
    return table_at(document, base)


def is_cri_disabled(document: Mapping[str, Any]) -> bool:
    """Return whether *document* disables the CRI plugin, as docker's does."""
    disabled = document.get("disabled_plugins", [])
    names = {"cri", "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"}
    return isinstance(disabled, list) and any(name in names for name in disabled)


def runtime_to_copy(cri: Mapping[str, Any], entry: RuntimeEntry) -> dict[str, Any] | None:
    """Return the settings of the runtime whose options are copied to *entry*, None if none fits.

    A runtime that runs the same program is *entry* under another name and is not copied.
    """
    runtimes = table_at(cri, ("containerd", "runtimes"))
    for name in candidates(look_up(cri, ("containerd", "default_runtime_name")), entry.name):
        if name in runtimes:
            table = table_at(runtimes, (name,))
            if look_up(table, ("options", "BinaryName")) != entry.path:
                return copy.deepcopy(table)
    return None


def _runtime(
    sources: Iterable[Mapping[str, Any]], entry: RuntimeEntry, version: int
) -> dict[str, Any]:
    """Return the table of the runtime *entry*: a copy except for the program.

    The runc that with_runc() adds has nothing to copy.
    """
    copies = (runtime_to_copy(cri, entry) for cri in sources)
    copied = next((table for table in copies if table not in (None, _RUNC)), None)
    table = copied if copied is not None else dict(_BARE_RUNTIME)
    if not table.get("runtime_type"):
        table["runtime_type"] = RUNTIME_TYPE
    options = table.setdefault("options", {})
    if not isinstance(options, dict):
        raise BadFileError('has "options" of a runtime, which is not a table', "correct it")
    options["BinaryName"] = entry.path
    if version == 1:
        options["Runtime"] = entry.path
    if copied is None and entry.has_systemd_cgroup:
        options["SystemdCgroup"] = True
    if entry.annotations:
        table["container_annotations"] = _annotations(table, entry)
    return table


def _annotations(table: Mapping[str, Any], entry: RuntimeEntry) -> list[str]:
    patterns = table.get("container_annotations", [])
    if not isinstance(patterns, list) or not all(isinstance(item, str) for item in patterns):
        raise BadFileError(
            'has "container_annotations", which is not a list of strings', "correct it"
        )
    ours = entry.annotation_patterns()
    return [*ours, *(item for item in patterns if item not in ours)]


def configure(
    document: Mapping[str, Any],
    entry: RuntimeEntry,
    version: int,
    *sources: Mapping[str, Any],
) -> list[Edit]:
    """Return the edits that register *entry* in the config *document*.

    Its options are copied from the first of *sources*, settings of the CRI plugin, that has a
    runtime to copy; without *sources*, from *document*. Raises BadFileError if a value that must
    be a table is not one.
    """
    base = plugin_path(version)
    cri = cri_settings(document, version)
    containerd = (*base, "containerd")
    runtimes = table_at(cri, ("containerd", "runtimes"))
    if entry.name in runtimes:
        table_at(runtimes, (entry.name,))
    default = look_up(cri, ("containerd", "default_runtime_name"))
    edits: list[Edit] = []
    if "version" not in document:
        edits.append((("version",), version))
    if entry.has_cdi:
        place = containerd if version == 1 else base
        edits.append(((*place, "enable_cdi"), True))
    if entry.is_default:
        edits.append(((*containerd, "default_runtime_name"), entry.name))
    elif default == entry.name:
        edits.append(((*containerd, "default_runtime_name"), None))
    table = _runtime(sources or (cri,), entry, version)
    edits.append(((*containerd, "runtimes", entry.name), table))
    return edits


def with_runc(document: Mapping[str, Any], version: int) -> list[Edit]:
    """Return the edits that keep containerd's built-in runc if *document* has no runtime."""
    path = (*plugin_path(version), "containerd", "runtimes")
    return [] if table_at(document, path) else [((*path, "runc"), _RUNC)]


def shared_settings(
    cri: Mapping[str, Any], version: int, main: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of a drop-in besides our runtimes: the settings *cri* of the plugin.

    containerd provides runc only as long as no runtime is configured. If *cri* has no runtime,
    runc is therefore added, as configured in *main*, the settings of the main file.
    """
    settings = copy.deepcopy(dict(cri))
    if not table_at(settings, ("containerd", "runtimes")):
        runc = table_at(main, ("containerd", "runtimes", "runc")) or _RUNC
        put(settings, ("containerd", "runtimes", "runc"), copy.deepcopy(runc))
    return {"version": version, "plugins": {plugin_path(version)[1]: settings}}


def remove(document: Mapping[str, Any], name: str) -> list[Edit]:
    """Return the edits that remove the runtime *name* and the tables that become empty."""
    base = plugin_path(version_of(document))
    containerd = (*base, "containerd")
    rest = copy.deepcopy(dict(document))
    edits: list[Edit] = []
    if look_up(document, (*containerd, "default_runtime_name")) == name:
        edits.append(((*containerd, "default_runtime_name"), None))
    path: Path = (*containerd, "runtimes", name)
    if name in table_at(document, path[:-1]):
        edits.append((path, None))
    for gone, _ in edits:
        put(rest, gone, None)
    while edits and len(path) > 1:
        path = path[:-1]
        if look_up(rest, path) != {}:
            break
        edits.append((path, None))
        put(rest, path, None)
    return edits
