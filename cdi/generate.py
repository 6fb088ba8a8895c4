# SPDX-License-Identifier: Apache-2.0
"""Turn named edits into a CDI spec and its text: canonical order, the lowest version; pure.

Every consumer reads this text as the same document. `lower` drops members for older consumers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from cdi import annotations as rule
from cdi import document, names, version, yaml_text
from cdi.errors import CdiError
from cdi.wire import Edits, Spec

# Members that are written even if they are empty or zero: required ones, and those for which
# readers in Go distinguish 0 from a missing member. `document.TABLES` sets the order.
_KEPT: dict[str, frozenset[str]] = {
    "spec": frozenset({"cdiVersion", "kind", "devices"}),
    "device": frozenset({"name", "containerEdits"}),
    "edits": frozenset({"intelRdt"}),
    "node": frozenset({"path", "fileMode", "uid", "gid"}),
    "net device": frozenset({"hostInterfaceName", "name"}),
    "mount": frozenset({"hostPath", "containerPath"}),
    "hook": frozenset({"hookName", "path", "timeout"}),
    "rdt": frozenset(),
}


def spec(
    kind: str,
    devices: Iterable[tuple[str, Edits]],
    common: Edits,
    *,
    annotations: dict[str, str] | None = None,
    device_annotations: Mapping[str, dict[str, str]] | None = None,
) -> Spec:
    """Return a document of *kind* with *devices* (name, edits), sorted by name.

    *device_annotations* has those of some devices, by name. Raises CdiError as `produce` does.
    """
    by_name = device_annotations or {}
    entries = [
        {"name": name, "annotations": by_name.get(name), "containerEdits": edits}
        for name, edits in devices
    ]
    return produce(
        {
            "kind": kind,
            "annotations": annotations,
            "devices": sorted(entries, key=lambda device: str(device["name"])),
            "containerEdits": common,
        }
    )


def produce(document_: object) -> Spec:
    """Return *document_* in canonical form with the lowest version; ignore its own version.

    Raises CdiError if a loader would refuse it, if its vendor or class has one character, or if
    its annotations do not follow Kubernetes' rules.
    """
    normal = document.normalise(document_)
    if isinstance(normal, dict):
        normal["cdiVersion"] = version.KNOWN[-1]
    result = canonical(document.check_normalised(normal))
    for part_name, part in zip(("vendor", "class"), names.split_kind(result["kind"])):
        if len(part) == 1:
            # It crashes the reference library up to v1.1.0.
            text = f'a {part_name} of one character, "{part}", crashes consumers'
            raise CdiError(part_name, text)
    for owner in (result, *result["devices"]):
        rule.check(owner.get("annotations"))
    result["cdiVersion"] = version.minimum(result)
    return result


def canonical(checked: Spec) -> Spec:
    """Return *checked* with members in canonical order and without empty or zero ones."""
    return cast("Spec", _ordered("spec", checked))


def lower(checked: Spec, max_version: str) -> tuple[Spec, list[str]]:
    """Return *checked* in canonical form without what *max_version* lacks, and what was dropped.

    The new document has the lowest version that is enough. The second result has one line for each
    dropped item. Raises CdiError "version-unknown", "version-too-low" if an item cannot be
    dropped, and "empty-edits" if a device would have no edits.
    """
    limit = max_version.removeprefix("v")
    if limit not in version.KNOWN:
        raise CdiError("version-unknown", f'version "{max_version}" is not known')
    result = canonical(document.check(checked))
    dropped: list[str] = []
    needed: list[str] = []
    gates = [
        (gate, drop)
        for gate, drop in _DROPS
        if version.KNOWN.index(gate) > version.KNOWN.index(limit)
    ]
    owners = [("the spec", cast("Any", result))]
    owners += [(f'device "{device["name"]}"', device) for device in result["devices"]]
    for where, owner in owners:
        for gate, drop in gates:
            for may_go, text in drop(owner):
                (dropped if may_go else needed).append(f"{where}: {text} (needs {gate})")
    if limit in version.KNOWN[: version.KNOWN.index(version.LOWEST)]:
        needed.append(f"no spec is of a version before {version.LOWEST}")
    if needed:
        raise CdiError("version-too-low", f"cannot be lowered to {limit}: {'; '.join(needed)}")
    for device in result["devices"]:
        if document.is_empty(device["containerEdits"]):
            text = f'no edits would be left of device "{device["name"]}" at {limit}'
            raise CdiError("empty-edits", text)
    if not result.get("containerEdits", True):
        del result["containerEdits"]
    result["cdiVersion"] = version.minimum(result)
    return result, dropped


def spec_name(kind: str, transient_id: str | None = None) -> str:
    """Return the usual file name of a spec of *kind*, without an extension.

    With a *transient_id* it is the name of a short-lived spec, for example of one container. The
    id must be unique on the host for that kind. Raises CdiError "kind" only if *kind* cannot be
    split; `store` refuses the name of a kind with a second slash.
    """
    vendor, cls = names.split_kind(kind)
    if not vendor:
        raise CdiError("kind", f'"{kind}" is not of the form vendor/class')
    name = f"{vendor}-{cls}"
    return name if transient_id is None else f"{name}_{transient_id.replace('/', '_')}"


def encode(checked: Spec, format_: str) -> str:
    """Return the text of *checked* in canonical form; *format_* is "json" or "yaml".

    Raises CdiError "syntax" for a string that UTF-8 cannot hold.
    """
    return encode_canonical(canonical(checked), format_)


def encode_canonical(spec_: Spec, format_: str) -> str:
    """Return the text of *spec_*, which is in canonical form, as `encode` does."""
    if format_ == "json":
        # Go's writer writes empty structures.
        return encode_json({**spec_, "containerEdits": spec_.get("containerEdits", {})})
    text = yaml_text.encode(spec_)
    _refuse_surrogates(text)
    return text


def encode_json(document_: Spec) -> str:
    """Return *document_* as one line of JSON that every reader accepts.

    Raises CdiError "syntax" for a string that UTF-8 cannot hold.
    """
    text = yaml_text.as_json(document_)
    _refuse_surrogates(text)
    return text + "\n"


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        character = ord(text[error.start])
        raise CdiError("syntax", f"a string has U+{character:04X}, not a character") from error


def _ordered(shape: Any, value: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return *value*, whose *shape* is one of `document.TABLES`, without empty members."""
    if isinstance(shape, list):
        return [_ordered(shape[0], item) for item in value]
    if shape is dict:
        # Go's writer sorts the keys of a map.
        return dict(sorted(value.items()))
    if not isinstance(shape, str):
        return value
    members = {}
    always_written = _KEPT[shape]
    for member, inside in document.TABLES[shape].items():
        if member in value:
            item = value[member]
            # Most values are scalars, which need no ordering.
            if isinstance(inside, (str, list)) or inside is dict:
                item = _ordered(inside, item)
            if item or member in always_written:
                members[member] = item
    return members


# Each function drops the members of one version from a spec or a device, and yields a pair for
# each: whether it can be dropped, and its description.
def _drop_1_1_0(owner: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    edits = owner.get("containerEdits", {})
    for device in edits.pop("netDevices", ()):
        yield True, f'network device "{device["hostInterfaceName"]}"'
    for member in ("schemata", "enableMonitoring"):
        if member in edits.get("intelRdt", {}):
            yield True, f"intelRdt {member} {json.dumps(edits['intelRdt'].pop(member))}"
            # An empty intelRdt would still count as an edit.
            if not edits["intelRdt"]:
                del edits["intelRdt"]


def _drop_0_7_0(owner: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    edits = owner.get("containerEdits", {})
    if "intelRdt" in edits:
        yield True, f"intelRdt {json.dumps(edits.pop('intelRdt'))}"
    for gid in edits.pop("additionalGids", ()):
        yield True, f"group {gid}"


def _drop_0_6_0(owner: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    if "." in owner.get("kind", "").partition("/")[2]:
        yield False, f'a dot in the class of "{owner["kind"]}"'
    for key in owner.pop("annotations", ()):
        yield True, f'annotation "{key}"'


def _drop_0_5_0(owner: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    if owner.get("name", "")[:1].isdigit():
        yield False, "its name begins with a digit"
    for node in owner.get("containerEdits", {}).get("deviceNodes", ()):
        path, host_path = node["path"], node.get("hostPath", "")
        if host_path == path:
            del node["hostPath"]
            yield True, f'the host path of device node "{path}", which is the same'
        elif host_path:
            yield False, f'device node "{path}" has another path, "{host_path}", on the host'


def _drop_0_4_0(owner: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    for mount in owner.get("containerEdits", {}).get("mounts", ()):
        if "type" in mount:
            # With one of these options, low-level runtimes ignore the type.
            is_bind = not {"bind", "rbind"}.isdisjoint(mount.get("options", ()))
            text = f'the type "{mount["type"]}" of the mount on "{mount["containerPath"]}"'
            if is_bind:
                del mount["type"]
            yield is_bind, text


_DROPS: tuple[tuple[str, Callable[[dict[str, Any]], Iterator[tuple[bool, str]]]], ...] = (
    ("1.1.0", _drop_1_1_0),
    ("0.7.0", _drop_0_7_0),
    ("0.6.0", _drop_0_6_0),
    ("0.5.0", _drop_0_5_0),
    ("0.4.0", _drop_0_4_0),
)
