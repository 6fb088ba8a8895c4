# SPDX-License-Identifier: Apache-2.0
"""The config files in which an engine is told of a runtime, and how each is made; reads only."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping
from typing import Any

from gpuruntime.engines import crio, docker, edits, files, podman, template_plan, toml_text
from gpuruntime.engines.config_paths import Place
from gpuruntime.engines.containerd_plan import drop_ins, of_containerd, of_k0s
from gpuruntime.engines.edits import Edit
from gpuruntime.engines.entry import Entry
from gpuruntime.engines.errors import BadFileError
from gpuruntime.engines.plans import Plan, drop_in, edited
from gpuruntime.errors import ConfigError

PODMAN_DEFAULTS = "/usr/share/containers/containers.conf"


def of(place: Place, entry: Entry, source: str | None = None) -> Plan:
    """Return what there is to do at *place* for *entry*.

    *source* is the config that the engine itself prints, for what is copied. Raises ConfigError.
    """
    try:
        return _OF[place.family](place, entry, source)
    except BadFileError as error:
        raise error.of(place.config) from error


def for_undo(place: Place, entry: Entry) -> Plan:
    """Return the files at *place* that may have *entry* in them. Raises ConfigError."""
    if place.family == "template":
        return template_plan.for_undo(place, entry)
    found = [target for each in drop_ins(place) for target in of(each, entry).targets]
    # The file that imports them is among the targets of each.
    return Plan(list({target.path: target for target in found}.values()), [])


def _docker(place: Place, entry: Entry, source: str | None) -> Plan:
    del source
    if place.drop_in:
        raise ConfigError("docker does not support drop-in configs", "leave --drop-in-config away")
    return Plan(
        [
            edited(
                place.config,
                "json",
                lambda document: docker.configure(document, entry),
                lambda document: docker.remove(document, entry.name),
            )
        ],
        [],
    )


def _crio(place: Place, entry: Entry, source: str | None) -> Plan:
    notes = ["CRI-O's CDI is always on: --cdi.enabled changes nothing"] if entry.has_cdi else []
    if source is not None:
        known = toml_text.parse(source)
    else:
        known = crio.merge(
            [_load(path) for path in (place.config, *_siblings(place.drop_in, "*"))]
        )

    def remove(document: Mapping[str, Any]) -> list[Edit]:
        return crio.remove(document, entry.name)

    if not place.drop_in:
        target = edited(
            place.config,
            "toml",
            lambda document: crio.configure(document, entry, known),
            remove,
        )
        return Plan([target], notes)
    fresh = edits.rendered(crio.configure({}, entry, known))
    return Plan([drop_in(place.drop_in, fresh, remove)], notes)


def _podman(place: Place, entry: Entry, source: str | None) -> Plan:
    del source
    notes = ["podman's CDI is always on: --cdi.enabled changes nothing"] if entry.has_cdi else []

    def remove(document: Mapping[str, Any]) -> list[Edit]:
        return podman.remove(document, entry.name)

    known: list[Any] | None = None
    paths = [PODMAN_DEFAULTS]
    if place.drop_in:
        paths += [place.config, *_siblings(place.drop_in, "*.conf")]
    for path in paths:
        names = edits.look_up(_load(path), podman.JSON)
        known = names if isinstance(names, list) else known
    if not place.drop_in:
        target = edited(
            place.config, "toml", lambda document: podman.configure(document, entry, known), remove
        )
        return Plan([target], notes)
    fresh = edits.rendered(podman.configure({}, entry, known))
    return Plan([drop_in(place.drop_in, fresh, remove)], notes)


def _load(path: str) -> dict[str, Any]:
    try:
        return toml_text.parse(files.read(path) or "")
    except BadFileError as error:
        raise error.of(path) from error


def _siblings(drop_in: str, pattern: str) -> list[str]:
    """Return the files that are read before *drop_in*, in order."""
    if not drop_in:
        return []
    directory = os.path.dirname(drop_in)
    found = sorted(glob.glob(os.path.join(glob.escape(directory), pattern)))
    return [path for path in found if path < drop_in and os.path.isfile(path)]


_OF: dict[str, Callable[[Place, Entry, str | None], Plan]] = {
    "docker": _docker,
    "containerd": of_containerd,
    "k0s": of_k0s,
    "crio": _crio,
    "podman": _podman,
    "template": template_plan.of_template,
}
