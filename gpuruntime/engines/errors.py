# SPDX-License-Identifier: Apache-2.0
"""The errors that keep an engine from being configured."""

from __future__ import annotations

from gpuruntime.errors import ConfigError


class BadFileError(Exception):
    """A file cannot be understood; *what* goes on from its name. Becomes a ConfigError."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint

    def of(self, path: str) -> ConfigError:
        """Return this as an error of the file *path*."""
        return ConfigError(f'"{path}" {self.what}', self.hint)
