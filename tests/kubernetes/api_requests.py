# SPDX-License-Identifier: Apache-2.0
"""`api_requests.py URL CA TOKEN`: send requests to an API server.

Standard input is a JSON object: name → method, path, body. Standard output is one too: name → the
message of the refusal, "" without one. kubectl does not do: it reads objects before it patches.
"""

from __future__ import annotations

import json
import ssl
import sys
import urllib.error
import urllib.request


def send(url: str, context: ssl.SSLContext, token: str, method: str, body: object) -> str:
    """Return why the server refuses the request, "" if it does not."""
    kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
    request = urllib.request.Request(
        url,
        data=None if body is None else json.dumps(body).encode(),
        method=method,
        headers={"Authorization": f"Bearer {token}", "Content-Type": kind},
    )
    try:
        with urllib.request.urlopen(request, context=context, timeout=20):
            return ""
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        return f"{error.code}: {json.loads(text)['message']}"


def main() -> None:
    """Send all requests, and print the answers."""
    url, authority, token = sys.argv[1:]
    context = ssl.create_default_context(cafile=authority)
    requests = json.load(sys.stdin)
    answers = {
        name: send(url + path, context, token, method, body)
        for name, (method, path, body) in requests.items()
    }
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
