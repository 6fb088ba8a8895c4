# SPDX-License-Identifier: Apache-2.0
"""Collect the relevant facts of an image's files, one after the other, within limits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from gpuruntime.formats.elf import ElfError
from gpuruntime.image import elf_file
from gpuruntime.image.contents import (
    CACHE,
    LOADER_CONFIG,
    LOADER_DIRECTORY,
    Binary,
    Contents,
)

MAX_ENTRIES = 1_000_000
MAX_LINKS = 300_000
MAX_BINARIES = 100_000
MAX_SCANNED_BYTES = 32 << 30
MAX_KEPT_CHARS = 128 << 20  # of names, and of configuration
MAX_CONFIG_BYTES = 8 << 20
MAX_CONFIG_FILES = 200
MIN_ELF_BYTES = 52
_HEAD_BYTES = 4096
DEADLINE_S = 120.0
_MAX_LIMITS = 8
_MAX_TARGET_CHARS = 4096


class Full(Exception):  # noqa: N818 (the end of the work, not a failure)
    """A limit is reached, and collecting ends; the contents say which limit."""


class Collector:
    """Adds files to *contents*. All methods raise Full beyond a limit."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self.contents = Contents()
        self._deadline_s = deadline_s
        self._end = time.monotonic() + deadline_s
        self._scanned = 0
        self._kept = 0
        self._damaged = 0

    def count(self) -> None:
        """Count one more entry of any kind."""
        self.contents.entries += 1
        if self.contents.entries > MAX_ENTRIES:
            raise self._full(f"only {MAX_ENTRIES} entries were examined")
        self.check_time()

    def check_time(self) -> None:
        """Raise Full if the deadline has passed."""
        if time.monotonic() > self._end:
            raise self._full(f"only {self._deadline_s:g} s were spent on reading it")

    def link(self, path: str, target: str) -> None:
        """Add the link *path*."""
        if len(target) > _MAX_TARGET_CHARS:
            return
        if len(self.contents.links) >= MAX_LINKS:
            raise self._full(f"only {MAX_LINKS} links were examined")
        self._keep(path, target)
        self.contents.links[path] = target

    def leave_out(self, path: str, why: str, *, has_libraries: bool = False) -> None:
        """Record that *path* is not examined, and *why*; only the first ones are named.

        With *has_libraries*, the loader may find libraries there.
        """
        if has_libraries:
            self.contents.is_complete = False
        self._damaged += 1
        if self._damaged <= _MAX_LIMITS:
            self.contents.limits.append(f'"{path}" is not examined: {why}')
        elif self._damaged == _MAX_LIMITS + 1:
            self.contents.limits.append("more files are not examined")

    def wants(self, path: str, size: int) -> bool:
        """Return whether `file` needs the regular file *path*."""
        if size == 0:
            if ".so" in path.rpartition("/")[2]:
                self._keep(path)
                self.contents.empty.add(path)
            return False
        return size >= MIN_ELF_BYTES or is_config(path)

    def file(self, path: str, size: int, read_at: elf_file.Reader) -> Binary | None:
        """Add the regular file *path* if it is relevant; return it if it is an ELF file.

        *read_at* may raise OSError, which the caller records.
        """
        contents = self.contents
        if is_config(path):
            if size <= MAX_CONFIG_BYTES and len(contents.config) < MAX_CONFIG_FILES:
                data = read_at(0, size)
                self._keep(path, data)
                contents.config[path] = data
            return None
        try:
            head = read_at(0, _HEAD_BYTES)
            if not elf_file.is_elf(head):
                return None
            if elf_file.is_big_endian(head):
                binary = Binary(path, "", "")
            else:
                binary = elf_file.read_binary(path, _from(head, read_at), self._scan)
        except ElfError as error:
            self.leave_out(path, f"a damaged ELF file: {error}")
            return None
        if len(contents.binaries) >= MAX_BINARIES:
            raise self._full(f"only {MAX_BINARIES} programs and libraries were examined")
        versions = binary.versions
        self._keep(path, binary.soname, *binary.needed, *binary.search, *versions.provides)
        self._keep(*(text for pair in versions.requires for text in pair))
        contents.binaries[path] = binary
        return binary

    def _keep(self, *texts: str | bytes) -> None:
        self._kept += sum(map(len, texts))
        if self._kept > MAX_KEPT_CHARS:
            raise self._full(f"only {MAX_KEPT_CHARS} characters of names were kept")

    def _scan(self, size: int) -> None:
        self._scanned += size
        if self._scanned > MAX_SCANNED_BYTES:
            raise self._full(f"only {MAX_SCANNED_BYTES} bytes were searched")
        self.check_time()

    def _full(self, why: str) -> Full:
        self.contents.is_complete = False
        self.contents.limits.append(f"the image is larger: {why}")
        return Full(why)


def _from(head: bytes, read_at: elf_file.Reader) -> elf_file.Reader:
    """Return *read_at* with the file's *head* cached: it has most of the headers."""

    def read(offset: int, length: int) -> bytes:
        if offset + length <= len(head):
            return head[offset : offset + length]
        return read_at(offset, length)

    return read


def read_of(fd: int) -> Callable[[int, int], bytes]:
    """Return a function that reads the file *fd*."""
    return lambda offset, length: os.pread(fd, length, offset)


def is_config(path: str) -> bool:
    """Return whether *path* is a file of the loader's configuration, which is kept unchanged."""
    return path in (CACHE, LOADER_CONFIG) or path.startswith(LOADER_DIRECTORY)
