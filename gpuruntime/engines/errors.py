# SPDX-License-Identifier: Apache-2.0
"""The error for a config file of an engine that cannot be edited."""

from __future__ import annotations

from gpuruntime.errors import ConfigError


class BadFileError(Exception):
    """A file cannot be edited; *what* continues a sentence that begins with the file's path."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint

    def of(self, path: str) -> ConfigError:
        """Return the ConfigError for the file *path*."""
        return ConfigError(f'"{path}" {self.what}', self.hint)
