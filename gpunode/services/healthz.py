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
    """The state of a service: *reasons* say why it is not ready; *details* are its own."""

    reasons: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        """Whether the service does all of its work."""
        return not self.reasons

    def as_json(self) -> str:
        """Return the report as a line of JSON."""
        report = {
            "live": True,
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

    def state() -> Answer:
        return Answer(report().as_json().encode())

    def ready() -> Answer:
        current = report()
        status = "200 OK" if current.is_ready else "503 Service Unavailable"
        return Answer(current.as_json().encode(), status=status)

    return {"/livez": state, "/healthz": state, "/readyz": ready}


def probe_server(text: str, report: Callable[[], Report]) -> HttpServer:
    """Return a server of probes on the address *text*; raise ArgumentError."""
    return HttpServer(text, "--healthz", routes(report))
