# SPDX-License-Identifier: Apache-2.0
"""An API server with one node that can be patched and watched, its events, and pods."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from node.fake_api_server import CONFIG

NODE = "n1"
NAMESPACE = "gpu-operator"
_NODE_PATH = f"/api/v1/nodes/{NODE}"
_PODS_PATH = f"/api/v1/namespaces/{NAMESPACE}/pods"


class FakeNodeApi:
    """The node with *labels*; *pods* has the label `app` of each pod on it.

    *history* has the labels after each patch, *events* the reasons and messages. Before each
    request *before* is called with method and path: it may change the node, or return the status
    of a refusal. Pods of an operand end when its label is no longer `true`, unless they *stay*.
    """

    def __init__(self, labels: Mapping[str, str], pods: Mapping[str, str] | None = None) -> None:
        self.labels = dict(labels)
        self.pods = dict(pods or {})
        self.stay = False
        self.history: list[dict[str, str]] = []
        self.events: list[tuple[str, str]] = []
        self.deleted: list[str] = []
        self.before: Callable[[str, str], int | None] = lambda *_: None
        self._version = 1
        self._changed = threading.Condition()
        self._is_closed = False
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer("GET")

            def do_PATCH(self) -> None:
                self._answer("PATCH")

            def do_POST(self) -> None:
                self._answer("POST")

            def do_DELETE(self) -> None:
                self._answer("DELETE")

            def _answer(self, method: str) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                url = urlsplit(self.path)
                if "watch" in parse_qs(url.query):
                    self._watch()
                    return
                code = api.before(method, url.path)
                document = None
                if code is None:
                    code, document = api.respond(method, url.path, parse_qs(url.query), body)
                status = {"kind": "Status", "message": f"refused with {code}", "code": code}
                text = json.dumps(document or status).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def _watch(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                for line in api.changes():
                    try:
                        self.wfile.write(line)
                        self.wfile.flush()
                    except OSError:
                        return

            def log_message(self, *arguments: Any) -> None:
                """Write nothing."""

        self._handler = Handler

    def set(self, name: str, value: str | None) -> None:
        """Set or remove a label, as another client."""
        with self._changed:
            if value is None:
                self.labels.pop(name, None)
            else:
                self.labels[name] = value
            self._version += 1
            self._changed.notify_all()

    def changes(self) -> Iterator[bytes]:
        """Yield the events of a watch."""
        sent = 0
        while True:
            with self._changed:
                while self._version == sent and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                sent = self._version
                event = {"type": "MODIFIED", "object": self._node()}
            yield json.dumps(event).encode() + b"\n"

    def _node(self) -> dict[str, Any]:
        metadata = {"name": NODE, "uid": "u", "resourceVersion": str(self._version)}
        return {
            "kind": "Node",
            "apiVersion": "v1",
            "metadata": {**metadata, "labels": self.labels},
        }

    def respond(
        self, method: str, path: str, query: Mapping[str, list[str]], body: bytes
    ) -> tuple[int, dict[str, Any] | None]:
        """Return status and content for a request."""
        if (method, path) == ("GET", _NODE_PATH):
            return 200, self._node()
        if (method, path) == ("PATCH", _NODE_PATH):
            return self._patched(json.loads(body)["metadata"])
        if (method, path) == ("GET", _PODS_PATH):
            return 200, self._pod_list(query["labelSelector"][0])
        if method == "POST" and path == "/api/v1/namespaces/default/events":
            event = json.loads(body)
            self.events.append((event["reason"], event["message"]))
            return 201, event
        if method == "DELETE" and path.startswith(_PODS_PATH):
            self.deleted.append(path.rpartition("/")[2])
            return 200, {"kind": "Status", "apiVersion": "v1", "metadata": {}}
        return 404, None

    def _patched(self, metadata: Mapping[str, Any]) -> tuple[int, dict[str, Any] | None]:
        with self._changed:
            if metadata["resourceVersion"] != str(self._version):
                return 409, None
            self.labels.update(metadata["labels"])
            self.history.append(dict(self.labels))
            self._version += 1
            self._changed.notify_all()
            return 200, self._node()

    def _pod_list(self, selector: str) -> dict[str, Any]:
        apps = selector.partition("(")[2].rstrip(")").split(",")
        is_paused = "paused-for-mig-change" in self.labels.values() and not self.stay
        items = [
            {"metadata": {"name": pod}, "status": {"phase": "Running"}}
            for pod, app in self.pods.items()
            if app in apps and not (is_paused and app != "nvidia-operator-validator")
        ]
        return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}

    @contextmanager
    def config(self, path: Path) -> Iterator[Path]:
        """Serve within the context, and yield the file *path*, a kubeconfig for it."""
        self._is_closed = False
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler)
        server.daemon_threads = True
        path.write_text(CONFIG.format(port=server.server_address[1]))
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield path
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()
            server.shutdown()
            thread.join()
            server.server_close()
