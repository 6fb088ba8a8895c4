# SPDX-License-Identifier: Apache-2.0
"""The errors of the API server; without its client, which takes 11 MiB of memory."""

from __future__ import annotations

from gpuruntime.errors import GpuRuntimeError

FORBIDDEN, NOT_FOUND, CONFLICT, GONE = 403, 404, 409, 410


class ApiServerError(GpuRuntimeError):
    """The API server cannot be reached, or refuses a request."""

    phase = "kubernetes"

    def __init__(
        self, message: str, hint: str | None = None, status: int = 0, retry_after_s: float = 0.0
    ) -> None:
        """*status* is that of HTTP, 0 without an answer.

        *retry_after_s* is the time that the server wants to have until the next request.
        """
        super().__init__(message, hint)
        self.status = status
        self.retry_after_s = retry_after_s


class GoneError(ApiServerError):
    """The version from which a watch was to start is too old."""
