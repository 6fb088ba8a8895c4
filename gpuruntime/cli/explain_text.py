# SPDX-License-Identifier: Apache-2.0
"""Format the report of `gpuruntime explain`: as lines of text, or as a JSON object; pure."""

from __future__ import annotations

import os
from typing import Any

from gpuruntime.cli.explain_reasons import HAS, LEFT_OUT, Reason
from gpuruntime.cli.explain_report import Report, Requirement
from gpuruntime.errors import GpuRuntimeError, escape

_WIDTH = 13
_MET = {True: "met", False: "not met", None: "not decided"}
# Kinds with many items: one line lists those that have the same reason.
_GROUPED = ("mount", f"{HAS} mount", LEFT_OUT)


def as_lines(report: Report, *, verbose: bool) -> str:
    """Return the report without its error; with *verbose*, one line a file."""
    facts = [
        *_of_request(report),
        *((f"{reason.kind}", _because(reason)) for reason in _grouped(report, verbose=verbose)),
        *(("ignored", str(ignored)) for ignored in report.ignored),
        *(("note", note) for note in report.notes),
        *(("warning", warning) for warning in report.warnings),
        ("runtime", report.runtime),
    ]
    return "".join(
        f"{name or 'nothing':{_WIDTH}} {escape(text)}\n" for name, text in facts if text
    )


def as_object(report: Report) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    return {
        "container": report.container or None,
        "mode": report.mode,
        "config": report.config,
        "source": report.source,
        "devices": report.devices,
        "capabilities": report.capabilities,
        "requirements": [
            {"requirement": item.text, "met": item.met, "why": item.why}
            for item in report.requirements
        ],
        "edits": report.edits,
        "removed": report.removed,
        "reasons": [
            {"kind": reason.kind, "what": reason.what, "why": reason.why}
            for reason in _all_reasons(report)
        ],
        "ignored": [{"what": item.what, "why": item.why} for item in report.ignored],
        "warnings": report.warnings,
        "notes": report.notes,
        "runtime": report.runtime or None,
        "error": None if report.error is None else _error(report.error),
    }


def _error(error: GpuRuntimeError) -> dict[str, Any]:
    return {"message": error.message, "hint": error.hint, "phase": error.phase}


def _of_request(report: Report) -> list[tuple[str, str]]:
    names = ", ".join(report.devices)
    facts = [
        ("container", report.container),
        ("mode", _with(report.mode, report.why_mode)),
        ("config", report.config or "no file: the defaults are in force"),
        (
            "request",
            _with(names or ("only the driver" if report.source else ""), report.why_request),
        ),
        ("capabilities", _with(", ".join(report.capabilities), report.why_capabilities)),
    ]
    facts += [("requirement", _required(item)) for item in report.requirements]
    return [*facts, ("requirement", report.why_requirements)]


def _required(item: Requirement) -> str:
    return _with(f'"{item.text}" is {_MET[item.met]}', item.why)


def _all_reasons(report: Report) -> list[Reason]:
    """Return all reasons, those for the request as a whole first."""
    whole = (
        ("mode", report.mode, report.why_mode),
        ("request", report.source, report.why_request),
        ("capabilities", ",".join(report.capabilities), report.why_capabilities),
        ("requirements", "", report.why_requirements),
    )
    return [*(Reason(*words) for words in whole if words[2]), *report.reasons]


def _grouped(report: Report, *, verbose: bool) -> list[Reason]:
    """Return the reasons; without *verbose*, files with the same reason are one."""
    if verbose:
        return report.reasons
    grouped: dict[object, Reason] = {}
    for reason in report.reasons:
        if reason.kind not in _GROUPED:
            grouped[reason] = reason
            continue
        key = (reason.kind, reason.why)
        name = os.path.basename(reason.what)
        earlier = grouped.get(key)
        what = f"{earlier.what}, {name}" if earlier else name
        grouped[key] = Reason(reason.kind, what, reason.why)
    return list(grouped.values())


def _because(reason: Reason) -> str:
    return _with(reason.what, reason.why)


def _with(what: str, why: str) -> str:
    return f"{what}: {why}" if what and why else what or why
