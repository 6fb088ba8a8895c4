# SPDX-License-Identifier: Apache-2.0
"""The config files of k3s and RKE2, and how each is made; reads only."""

from __future__ import annotations

import os

from gpuruntime.engines import files, template
from gpuruntime.engines.config_paths import Place
from gpuruntime.engines.entry import Entry
from gpuruntime.engines.plans import Plan, whole
from gpuruntime.engines.work import Target
from gpuruntime.errors import ConfigError


def of_template(place: Place, entry: Entry, source: str | None) -> Plan:
    """Return what there is to do at *place*, a k3s or an RKE2; raise ConfigError if it cannot."""
    del source
    notes = []
    if entry.has_cdi:
        notes.append(f"{place.name} decides itself about CDI: --cdi.enabled changes nothing")
    if entry.name in template.DETECTED:
        return _detected(place, entry, notes)
    if entry.is_default:
        raise ConfigError(
            f"{place.name} does not start with a default runtime that it has not found itself, "
            f'and of ours it finds "nvidia" only',
            "ask for the runtime by a RuntimeClass, or give --runtime-name nvidia after an "
            "installation under the incumbent's names",
        )
    return Plan([_in_template(place, entry)], notes)


def _in_template(place: Place, entry: Entry) -> Target:
    path = _template_path(place.config)
    version = template.version_of(path, files.read(path))
    return Target(
        path,
        "text",
        lambda text: template.configure(text, entry, version),
        lambda text: template.remove(text or ""),
    )


def _template_path(path: str) -> str:
    """Return the template in the directory *path*, or beside the config *path* that is made of it.

    Old releases know one name only; new ones take that too, if there is no file of the other.
    """
    is_generated = os.path.basename(path) == "config.toml"
    if not (is_generated or os.path.isdir(path) or os.path.basename(path) == "containerd"):
        return path
    directory = os.path.dirname(path) if is_generated else path
    new, old = (os.path.join(directory, name) for name in template.NAMES)
    if os.path.lexists(new) != os.path.lexists(old):
        return new if os.path.lexists(new) else old
    generated = files.read(os.path.join(directory, "config.toml"))
    return new if template.version_of("", generated) == 3 else old


def _detected(place: Place, entry: Entry, notes: list[str]) -> Plan:
    """Return what there is to do where the engine finds the runtime itself: the default."""
    program = template.DETECTED[entry.name]
    places = [f"{directory}/{program}" for directory in template.DETECTED_IN]
    if not any(map(os.path.exists, places)):
        raise ConfigError(
            f'{place.name} looks for the runtime "{entry.name}" in {" and ".join(places)}, and '
            "it is in neither",
            "install under the incumbent's names, or choose another --runtime-name",
        )
    notes.append(f'{place.name} finds the runtime "{entry.name}" itself when it starts')
    return Plan([whole(place.more, _default_line(entry))] if entry.is_default else [], notes)


def _default_line(entry: Entry) -> str:
    return f"default-runtime: {entry.name}\n"


def for_undo(place: Place, entry: Entry) -> Plan:
    """Return the files that may have *entry* in them."""
    return Plan([_in_template(place, entry), whole(place.more, _default_line(entry))], [])
