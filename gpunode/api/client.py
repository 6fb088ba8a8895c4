# SPDX-License-Identifier: Apache-2.0
"""Connect to the API server, and turn its errors into ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx2
import yaml
from lightkube import AsyncClient, Client
from lightkube.config.kubeconfig import KubeConfig
from lightkube.core.exceptions import ApiError, ConfigError

from gpunode.api.errors import FORBIDDEN, GONE, NOT_FOUND, ApiServerError, GoneError

FIELD_MANAGER = "gpu-node"
_DEADLINE_S = 10.0
_LABEL_HINT = "give the service account the rights of deploy/base/feature-discovery"
NODE_HINT = "let the service account get and watch nodes"
# The API server asks for seconds; a proxy before it may ask for anything.
_MOST_RETRY_AFTER_S, _DIGITS = 300, 7


def connect(kubeconfig: str = "") -> Client:
    """Return a client of the cluster of this pod, or of that in the file *kubeconfig*.

    Without a file, KUBECONFIG and ~/.kube/config are tried after the pod's service account.
    Raises ApiServerError; nothing is requested yet.
    """
    with _connecting(kubeconfig):
        return Client(
            _config(kubeconfig), field_manager=FIELD_MANAGER, timeout=httpx2.Timeout(_DEADLINE_S)
        )


def connect_async(kubeconfig: str = "") -> AsyncClient:
    """Do the same as `connect` for a client of the event loop."""
    with _connecting(kubeconfig):
        return AsyncClient(
            _config(kubeconfig), field_manager=FIELD_MANAGER, timeout=httpx2.Timeout(_DEADLINE_S)
        )


def _config(kubeconfig: str) -> KubeConfig:
    return KubeConfig.from_file(kubeconfig) if kubeconfig else KubeConfig.from_env()


@contextlib.contextmanager
def _connecting(kubeconfig: str) -> Iterator[None]:
    try:
        yield
    except (ConfigError, OSError, ValueError) as error:
        raise ApiServerError(
            f"cannot find the API server: {error}", "run this in a pod, or name --kubeconfig"
        ) from error
    except (yaml.YAMLError, httpx2.InvalidURL, LookupError, TypeError, AttributeError) as error:
        # lightkube does not check what it reads.
        raise ApiServerError(
            f'cannot find the API server: "{kubeconfig or "kubeconfig"}" is not a kubeconfig',
            "name a file with clusters, users, contexts and current-context: --kubeconfig",
        ) from error


@contextlib.contextmanager
def request(what: str, rights: str = _LABEL_HINT) -> Iterator[None]:
    """Turn the errors of a request into ApiServerError; *what* says what it does.

    *rights* is the hint if the API server forbids it.
    """
    try:
        yield
    except ApiError as error:
        hints = {
            FORBIDDEN: rights,
            NOT_FOUND: "check the name of the node, and that the resource is installed",
        }
        status = error.status.code or 0
        hint = hints.get(status, "look at the log of the API server")
        kind = GoneError if status == GONE else ApiServerError
        message = f"cannot {what}: {error.status.message}"
        raise kind(message, hint, status, _retry_after(error)) from error
    except httpx2.HTTPStatusError as error:
        # With a body that is not a Status, such as those of an overloaded server and of proxies.
        status = error.response.status_code
        message = f"cannot {what}: the API server answers with the HTTP status {status}"
        hint = "look at the log of the API server, and of proxies before it"
        raise ApiServerError(message, hint, status, _retry_after(error)) from error
    except (httpx2.HTTPError, OSError, ValueError) as error:
        # ValueError: what answers is not an API server.
        raise ApiServerError(
            f"cannot {what}: {str(error) or type(error).__name__}",
            "check that the API server can be reached from here",
        ) from error


def _retry_after(error: httpx2.HTTPStatusError) -> float:
    """Return the seconds until the server wants the next request, 0 if it does not say."""
    text = error.response.headers.get("Retry-After", "")
    is_number = text.isascii() and text.isdecimal() and len(text) < _DIGITS
    return float(min(int(text), _MOST_RETRY_AFTER_S)) if is_number else 0.0
