# SPDX-License-Identifier: Apache-2.0
"""Read the root file system of an image from a tar stream, without extracting it.

An ELF file is held in memory while it is read, a large one in a file without a name. The rest of
the stream is skipped.
"""

from __future__ import annotations

import posixpath
import tarfile
import tempfile
from typing import IO, Any

from gpuruntime.errors import GpuRuntimeError
from gpuruntime.image.collect import MIN_ELF_BYTES, Collector, Full, is_config
from gpuruntime.image.contents import Contents
from gpuruntime.image.elf_file import is_elf

MAX_MEMORY_BYTES = 32 << 20
MAX_KEPT_BYTES = 4 << 30  # of one file; the rest of it is skipped
_CHUNK_BYTES = 1 << 20


def read(stream: IO[bytes], collector: Collector) -> Contents:
    """Return the contents of the archive *stream*; raise GpuRuntimeError if it is damaged."""
    try:
        tar: Any
        with tarfile.open(fileobj=stream, mode="r|", errorlevel=0) as tar:
            while (member := tar.next()) is not None:
                collector.count()
                _member(tar, member, collector)
                # tarfile keeps each member.
                tar.members.clear()
    except Full:
        # The contents record the limit.
        pass
    except (tarfile.TarError, OSError, ValueError, OverflowError) as error:
        raise GpuRuntimeError(
            f"the engine's export of the image cannot be read: {error}",
            "check that the engine can export a container of it",
        ) from error
    return collector.contents


def _member(tar: tarfile.TarFile, member: tarfile.TarInfo, collector: Collector) -> None:
    path = posixpath.normpath(f"/{member.name}").replace("//", "/")
    if member.issym():
        collector.link(path, member.linkname)
    elif member.islnk():
        # To another member: a library is found by either of its names.
        collector.link(path, posixpath.normpath(f"/{member.linkname}").replace("//", "/"))
    elif member.isreg() and collector.wants(path, member.size):
        file = tar.extractfile(member)
        assert file is not None
        _regular(file, path, member.size, collector)


def _regular(file: IO[bytes], path: str, size: int, collector: Collector) -> None:
    head = file.read(MIN_ELF_BYTES)
    if not (is_elf(head) or is_config(path)):
        return
    with tempfile.SpooledTemporaryFile(MAX_MEMORY_BYTES) as spool:
        spool.write(head)
        rest = min(size, MAX_KEPT_BYTES) - len(head)
        while rest > 0:
            chunk = file.read(min(rest, _CHUNK_BYTES))
            if not chunk:
                break
            spool.write(chunk)
            rest -= len(chunk)
            collector.check_time()

        def read_at(offset: int, length: int) -> bytes:
            spool.seek(offset)
            return spool.read(length)

        collector.file(path, size, read_at)
