# SPDX-License-Identifier: Apache-2.0
"""The one exception of this package: a problem with a CDI document or request, by category."""

from __future__ import annotations


class CdiError(Exception):
    """A document, a name or an injection is refused, for the reason *category*, a stable word."""

    def __init__(self, category: str, message: str) -> None:
        super().__init__(message)
        self.category = category
        self.message = message
