# SPDX-License-Identifier: Apache-2.0
"""Named edits → a CDI spec document: members in canonical order, the lowest version; pure."""

from __future__ import annotations

import json
from typing import Any, cast

from cdi import document, version
from cdi.wire import Edits, Spec

_ORDER = {
    "spec": ("cdiVersion", "kind", "annotations", "devices", "containerEdits"),
    "device": ("name", "annotations", "containerEdits"),
    "edits": (
        "env",
        "deviceNodes",
        "netDevices",
        "hooks",
        "mounts",
        "intelRdt",
        "additionalGids",
    ),
}


def spec(kind: str, devices: list[tuple[str, Edits]], common: Edits) -> Spec:
    """Return a checked document of *kind* with *devices* (name, edits), sorted by name.

    Raises CdiError if such a document would be refused on loading.
    """
    entries = [
        {"name": name, "containerEdits": _ordered("edits", edits)}
        for name, edits in sorted(devices, key=lambda item: item[0])
    ]
    result = cast("Spec", {"cdiVersion": "", "kind": kind, "devices": entries})
    edits = _ordered("edits", common)
    if edits:
        result["containerEdits"] = cast("Edits", edits)
    result["cdiVersion"] = version.minimum(result)
    return document.check(cast("Spec", _ordered("spec", result)))


def encode_json(document_: Spec) -> str:
    """Return *document_* as one line of JSON, in a form that every reader takes.

    No escaped slash and no surrogate escapes: readers that take JSON for YAML 1.1 refuse them.
    """
    return json.dumps(document_, ensure_ascii=False, separators=(",", ":")) + "\n"


def _ordered(table: str, value: Any) -> dict[str, Any]:  # noqa: ANN401 (any TypedDict)
    """Return *value* with its members in canonical order, the empty ones left out."""
    return {m: value[m] for m in _ORDER[table] if value.get(m) or m in ("devices", "cdiVersion")}
