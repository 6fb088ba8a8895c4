# SPDX-License-Identifier: Apache-2.0
"""The config files of containerd, MicroK8s and k0s, and how each is changed; reads only."""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Mapping
from typing import Any

from gpuruntime.engines import containerd, containerd_socket, files, toml_text
from gpuruntime.engines.config_paths import Place
from gpuruntime.engines.edits import Edit, table_at
from gpuruntime.engines.entry import Entry
from gpuruntime.engines.errors import BadFileError
from gpuruntime.engines.plans import Plan, drop_in, edited
from gpuruntime.errors import ConfigError

K0S_MANAGED = "# k0s_managed=true"
K0S_CRI = "/run/k0s/containerd-cri.toml"


def of_containerd(place: Place, entry: Entry, source: str | None) -> Plan:
    """Return what there is to do at *place*, a containerd or a MicroK8s; may raise BadFileError.

    *source* is the config as the program prints it, None for that of the file.
    """
    text = files.read(place.config)
    if text is None and place.name == "microk8s":
        # Nothing but what microk8s has put there is a template.
        raise ConfigError(f'there is no "{place.config}"', "install microk8s first")
    main = toml_text.parse(text or "")
    version = containerd.version_of(main) if main else _new_version(place.socket)
    known = main
    if source is not None and (version > 1 or not main):
        known = toml_text.parse(source)
        version = containerd.version_of(known)
        if main and containerd.version_of(main) > version:
            raise ConfigError(
                f'"{place.config}" has version {containerd.version_of(main)}, but the containerd '
                f"that was asked has version {version}: it is another one",
                'name its program with "--executable-path", or use "--config-source file"',
            )
    cri = table_at(known, containerd.plugin_path(version))
    notes = []
    if containerd.is_cri_disabled(main):
        notes.append(
            f'"{place.config}" turns the CRI plugin off by "disabled_plugins": Kubernetes gets no '
            "runtime from this containerd"
        )
    if containerd.runtime_to_copy(cri, entry.name) is None and not entry.has_systemd_cgroup:
        notes.append(
            f'no runtime to take options from: "{entry.name}" has the defaults, without '
            "SystemdCgroup"
        )
    if version == 1 or not place.drop_in:
        target = edited(
            place.config,
            "toml",
            lambda document: containerd.configure(
                document, entry, containerd.version_of(document) if document else version, cri
            ),
            lambda document: containerd.remove(document, entry.name),
        )
        return Plan([target], notes)
    place = _read_last(place, main)
    before, after = containerd.imported(main, place.config, place.drop_in)
    notes += [
        f'"{path}" is read after "{place.drop_in}": a containerd before 2.1 takes all settings of '
        "the CRI plugin from the last file, and forgets ours"
        for path in after
        if containerd.has_cri(path)
    ]
    effective = cri if source is not None else containerd.effective_cri(cri, version, before)
    fresh = containerd.drop_in(effective, entry, version, cri)
    return Plan(
        [
            drop_in(
                place.drop_in, fresh, lambda document: containerd.remove(document, entry.name)
            ),
            edited(
                place.config,
                "toml",
                lambda document: containerd.imports(
                    document, place.config, place.drop_in, version
                ),
                lambda document: _without_import(document, place.drop_in),
            ),
        ],
        notes,
    )


def _read_last(place: Place, main: Mapping[str, Any]) -> Place:
    """Return *place* with the other drop-in if the usual one would be read before somebody's.

    Once that is there it stays, whatever becomes of those.
    """
    _, after = containerd.imported(main, place.config, place.drop_in)
    others = [path for path in after if path != place.last]
    if place.last and (os.path.exists(place.last) or any(map(containerd.has_cri, others))):
        return dataclasses.replace(place, drop_in=place.last)
    return place


def drop_ins(place: Place) -> list[Place]:
    """Return *place* for each drop-in of ours that is there; the usual one if none is."""
    paths = [path for path in (place.drop_in, place.last) if path and os.path.exists(path)]
    return [dataclasses.replace(place, drop_in=path, last="") for path in paths or [place.drop_in]]


def _new_version(socket: str) -> int:
    """Return the version that a new config is to have for the containerd at *socket*."""
    major = containerd_socket.major_version(socket) if socket else None
    return containerd.NEW_VERSION if major is None or major < 2 else 3


def _without_import(document: Mapping[str, Any], target: str) -> list[Edit]:
    """Return the edits by which the drop-in *target* is no longer imported, if it is the only."""
    pattern = containerd.import_of(target)
    known = document.get("imports", [])
    others = [path for path in glob.glob(pattern) if path != target]
    if not isinstance(known, list) or pattern not in known or others:
        return []
    kept = [item for item in known if item != pattern]
    found: list[Edit] = [(("imports",), kept or None)]
    if not document.keys() - {"imports", "version"} and not kept:
        found.append((("version",), None))
    return found


def of_k0s(place: Place, entry: Entry, source: str | None) -> Plan:
    """Return what there is to do at *place*, a k0s; may raise BadFileError."""
    main = files.read(place.config)
    if main is not None and K0S_MANAGED not in main:
        return of_containerd(place, entry, source)
    # k0s merges such a file into what it generates: there is nothing to copy.
    try:
        generated = toml_text.parse(source or files.read(K0S_CRI) or "")
    except BadFileError as error:
        raise error.of(K0S_CRI) from error
    known = generated or toml_text.parse(main or "")
    version = containerd.version_of(known) if "version" in known else containerd.NEW_VERSION
    fresh = containerd.patch(entry, version, generated)
    target = drop_in(
        place.drop_in, fresh, lambda document: containerd.remove(document, entry.name)
    )
    return Plan([target], [])
