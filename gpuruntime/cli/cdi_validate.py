# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime cdi validate`: check CDI specs, naming every problem."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict

import click

from cdi import validate as checks
from cdi.errors import CdiError
from cdi.registry import ENDINGS, MAX_SPEC_BYTES
from cdi.validate import Finding
from gpuruntime.cli import spec_files
from gpuruntime.errors import escape


@click.command()
@click.option("--strict", is_flag=True, help="Fail on warnings too.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
def validate(files: tuple[str, ...], *, strict: bool, as_json: bool) -> None:
    """Check CDI specs, naming every problem of each FILE; "-" is standard input.

    An error keeps a spec from loading. A warning does not: the spec is against the prose of the
    format, unsafe, or not understood by every consumer. The exit status is 1 if there is an error
    or, with --strict, a warning.
    """
    found = [(name, finding) for name in files for finding in _findings(name)]
    spec_files.write_stdout(
        _to_json(found) if as_json else "".join(_line(*pair) for pair in found)
    )
    errors = sum(finding.severity == "error" for _, finding in found)
    warnings = len(found) - errors
    counts = f"{_count(errors, 'error')}, {_count(warnings, 'warning')}"
    click.echo(f"{_count(len(files), 'file')}: {counts}", err=True)
    if errors or (strict and warnings):
        click.get_current_context().exit(1)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _findings(name: str) -> list[Finding]:
    try:
        text = _read(name)
    except CdiError as error:
        return [Finding(None, "error", error.category, "", error.message)]
    found = checks.validate(text, name, stat_host=os.stat)
    if name != "-" and not name.endswith(ENDINGS):
        message = f"in a spec directory only files ending in {' or '.join(ENDINGS)} are read"
        found.insert(0, Finding(None, "warning", "file-name", "", message))
    return found


def _read(name: str) -> str:
    """Return the text of the file *name*; raise CdiError if it is none, or too long."""
    try:
        if name == "-":
            data = _read_up_to(0)
        else:
            # O_NONBLOCK: a FIFO must not hang us.
            fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise CdiError("syntax", "not a regular file")
                data = _read_up_to(fd)
            finally:
                os.close(fd)
    except OSError as error:
        raise CdiError("syntax", f"cannot read it: {error.strerror}") from error
    if len(data) > MAX_SPEC_BYTES:
        raise CdiError("syntax", f"larger than {MAX_SPEC_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CdiError("syntax", f"no UTF-8 at byte {error.start}") from error


def _read_up_to(fd: int) -> bytes:
    """Return what *fd* holds, or one byte more than a spec may have."""
    data = bytearray()
    while len(data) <= MAX_SPEC_BYTES:
        chunk = os.read(fd, MAX_SPEC_BYTES + 1 - len(data))
        if not chunk:
            break
        data += chunk
    return bytes(data)


def _line(name: str, finding: Finding) -> str:
    place = [escape(name)] + ([str(finding.line)] if finding.line else [])
    where = f"{finding.where}: " if finding.where else ""
    told = escape(f"{finding.category}: {where}{finding.message}")
    return f"{':'.join(place)}: {finding.severity}: {told}\n"


def _to_json(found: list[tuple[str, Finding]]) -> str:
    return (
        json.dumps([{"file": name, **asdict(finding)} for name, finding in found], indent=2) + "\n"
    )
