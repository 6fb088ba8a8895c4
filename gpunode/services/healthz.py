# SPDX-License-Identifier: Apache-2.0
"""Answer probes over HTTP: whether a service lives and is ready, and why not, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpunode.services.http_server import Answer, HttpServer


@dataclass(frozen=True, slots=True)
class Report:
    """The state of a service: *reasons* say why it is not ready; *details* are its own.

    *is_live* is False if only a restart of the program helps.
    """

    reasons: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    is_live: bool = True

    @property
    def is_ready(self) -> bool:
        """Whether the service does all of its work."""
        return not self.reasons

    def as_json(self) -> str:
        """Return the report as a line of JSON."""
        report = {
            "live": self.is_live,
            "ready": self.is_ready,
            "reasons": list(self.reasons),
            **self.details,
        }
        return json.dumps(report) + "\n"


def routes(report: Callable[[], Report]) -> dict[str, Callable[[], Answer]]:
    """Return the answers for `/livez`, `/readyz` and `/healthz`.

    `/livez` and `/healthz` have the status 200 whenever this program answers; `/readyz` has 503
    while the service is not ready. All have the whole report as their body.
    """
    return {
        "/livez": lambda: live_answer(report()),
        "/healthz": lambda: live_answer(report()),
        "/readyz": lambda: ready_answer(report()),
    }


def live_answer(report: Report) -> Answer:
    """Return the answer to whether the program lives."""
    return _answer(report, is_ok=report.is_live)


def ready_answer(report: Report) -> Answer:
    """Return the answer to whether the service is ready."""
    return _answer(report, is_ok=report.is_ready)


def _answer(report: Report, *, is_ok: bool) -> Answer:
    status = "200 OK" if is_ok else "503 Service Unavailable"
    return Answer(report.as_json().encode(), status=status)


def probe_server(text: str, report: Callable[[], Report]) -> HttpServer:
    """Return a server of probes on the address *text*; raise ArgumentError."""
    return HttpServer(text, "--healthz", routes(report))
