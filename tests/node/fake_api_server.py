# SPDX-License-Identifier: Apache-2.0
"""An API server that has the objects that a test sets, over HTTP."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

CONFIG = """\
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: u, user: {{token: t}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"""


class FakeApiServer:
    """The objects by path; *requests* are the methods, paths and bodies of all requests.

    The method of a watch is WATCH. With *ends_watches* one ends before its first event.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self.objects = dict(objects)
        self._changed = threading.Condition()
        self._is_closing = False
        self.requests: list[tuple[str, str, str]] = []
        self.ends_watches = False
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer("GET")

            def do_PATCH(self) -> None:
                self._answer("PATCH")

            def _answer(self, method: str) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                path = urlsplit(self.path).path
                if "watch=true" in self.path:
                    self._stream(path)
                    return
                server.requests.append((method, self.path, body))
                document = server.objects.get(path)
                code = 404 if document is None else document.get("code", 200)
                missing = {"kind": "Status", "message": f"{path} not found", "code": 404}
                text = json.dumps(document or missing).encode()
                self.send_response(code)
                kind = (document or {}).get("type", "application/json")
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(text)))
                if document and "retryAfter" in document:
                    self.send_header("Retry-After", document["retryAfter"])
                self.end_headers()
                self.wfile.write(text)

            def _stream(self, path: str) -> None:
                server.requests.append(("WATCH", self.path, ""))
                self.send_response(200)
                self.end_headers()
                if server.ends_watches:
                    return
                (seen,) = parse_qs(urlsplit(self.path).query).get("resourceVersion", ["0"])
                with server._changed:
                    while not server._is_closing:
                        for name, document in server.objects.items():
                            version = document["metadata"]["resourceVersion"]
                            if name.startswith(path) and version != seen:
                                event = {"type": "MODIFIED", "object": document}
                                self.wfile.write(json.dumps(event).encode() + b"\n")
                                self.wfile.flush()
                                seen = version
                        server._changed.wait()

            def log_message(self, *arguments: Any) -> None:
                """Write nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]

    def change(self, path: str, document: Any) -> None:
        """Replace an object, and send it to the watches of its collection."""
        with self._changed:
            version = str(int(self.objects[path]["metadata"]["resourceVersion"]) + 1)
            metadata = {**document["metadata"], "resourceVersion": version}
            self.objects[path] = {**document, "metadata": metadata}
            self._changed.notify_all()

    @contextmanager
    def config(self, path: Path) -> Iterator[Path]:
        """Serve within the context, and yield the file *path*, a kubeconfig for it."""
        path.write_text(CONFIG.format(port=self.port))
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield path
        finally:
            with self._changed:
                self._is_closing = True
                self._changed.notify_all()
            self._server.shutdown()
            thread.join()
            self._server.server_close()
