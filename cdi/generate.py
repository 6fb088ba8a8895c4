# SPDX-License-Identifier: Apache-2.0
"""Turn named edits into a CDI spec and its text: canonical order, the lowest version; pure.

Every consumer reads this text in the same way. `lower` drops members for older consumers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from cdi import annotations as rule
from cdi import document, names, version, yaml_text
from cdi.errors import CdiError
from cdi.wire import Edits, Spec

# What stays though it is empty or zero: members that are required, and those where readers in Go
# tell 0 from nothing. The order of members is that of `document.TABLES`.
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
) -> Spec:
    """Return a document of *kind* with *devices* (name, edits), sorted by name.

    Raises CdiError as `produce`.
    """
    entries = [{"name": name, "containerEdits": edits} for name, edits in devices]
    return produce(
        {
            "kind": kind,
            "annotations": annotations,
            "devices": sorted(entries, key=lambda device: str(device["name"])),
            "containerEdits": common,
        }
    )


def produce(document_: object) -> Spec:
    """Return *document_* in canonical form and of the lowest version, whatever it claims.

    Raises CdiError if it would be refused on loading, or has what only a reader puts up with:
    a vendor or class of one character, or annotations that are not by Kubernetes' rule.
    """
    normal = document.normalise(document_)
    if isinstance(normal, dict):
        normal["cdiVersion"] = version.KNOWN[-1]
    result = canonical(document.check_normalised(normal))
    for what, part in zip(("vendor", "class"), names.split_kind(result["kind"])):
        if len(part) == 1:
            # As consumers built with any release of the reference library up to v1.1.0.
            text = f'a {what} of one character, "{part}", crashes consumers'
            raise CdiError(what, text)
    for owner in (result, *result["devices"]):
        rule.check(owner.get("annotations"))
    result["cdiVersion"] = version.minimum(result)
    return result


def canonical(checked: Spec) -> Spec:
    """Return *checked* with its members in canonical order, the empty and zero ones left out."""
    return cast("Spec", _ordered("spec", checked))


def lower(checked: Spec, max_version: str) -> tuple[Spec, list[str]]:
    """Return *checked* in canonical form without what *max_version* lacks, and what was dropped.

    The new document claims the lowest version that will do; there is one line for each thing that
    is missing in it. Raises CdiError "version-unknown", "version-too-low" if something cannot be
    dropped, and "empty-edits" if nothing would be left of a device.
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
            text = f'nothing would be left of device "{device["name"]}" at {limit}'
            raise CdiError("empty-edits", text)
    if not result.get("containerEdits", True):
        del result["containerEdits"]
    result["cdiVersion"] = version.minimum(result)
    return result, dropped


def spec_name(kind: str, transient_id: str | None = None) -> str:
    """Return the usual name, without ending, of the file of *kind*.

    With a *transient_id* it is one for a spec that lives no longer than, say, one container. The
    id is to be unique on the host for that kind. Only a *kind* that cannot be split is refused,
    as CdiError "kind"; the name of one with a second slash no store accepts.
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
        # Go's writer leaves no structure out.
        return encode_json({**spec_, "containerEdits": spec_.get("containerEdits", {})})
    text = yaml_text.encode(spec_)
    _refuse_surrogates(text)
    return text


def encode_json(document_: Spec) -> str:
    """Return *document_* as one line of JSON, in a form that every reader takes.

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
    """Return *value*, of the *shape* by `document.TABLES`, without members that are empty."""
    if isinstance(shape, list):
        return [_ordered(shape[0], item) for item in value]
    if shape is dict:
        # As Go's writer: a map has no order of its own.
        return dict(sorted(value.items()))
    if not isinstance(shape, str):
        return value
    members = {}
    kept = _KEPT[shape]
    for member, inside in document.TABLES[shape].items():
        if member in value:
            item = value[member]
            # Most are scalars, which are in order.
            if isinstance(inside, (str, list)) or inside is dict:
                item = _ordered(inside, item)
            if item or member in kept:
                members[member] = item
    return members


# Each yields, for a spec or a device, (whether it can be dropped, what it is), and drops it.
def _drop_1_1_0(owner: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    edits = owner.get("containerEdits", {})
    for device in edits.pop("netDevices", ()):
        yield True, f'network device "{device["hostInterfaceName"]}"'
    for member in ("schemata", "enableMonitoring"):
        if member in edits.get("intelRdt", {}):
            yield True, f"intelRdt {member} {json.dumps(edits['intelRdt'].pop(member))}"
            # What is left says nothing, and would be more than nothing.
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
        yield False, f'there is a dot in the class of "{owner["kind"]}"'
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
            # With one of these options, low-level runtimes do not look at the type.
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
