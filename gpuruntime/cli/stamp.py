# SPDX-License-Identifier: Apache-2.0
"""The stamp of a generated spec: what it was made from, beside the run-time state of this boot.

`cdi refresh` compares it with the host, and whoever finds a spec that does not fit the driver can
say from when it is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import stat
from typing import Any

import click

from cdi import store
from cdi.errors import CdiError
from cdi.wire import Edits, Spec
from gpuruntime import config
from gpuruntime.cli.generator import Options
from gpuruntime.discover import fingerprint
from gpuruntime.discover.fingerprint import Fingerprint
from gpuruntime.errors import escape
from gpuruntime.trust import may_trust

DIRECTORY = f"{config.RUN_DIRECTORY}/specs"


@dataclasses.dataclass(frozen=True, slots=True)
class Stamp:
    """What the spec at *path*, whose bytes have *digest*, was made from."""

    path: str
    digest: str
    driver_version: str
    boot_id: str
    fingerprint: Fingerprint
    files: dict[str, list[int]]
    options: dict[str, Any]


def comment(driver_version: str) -> str:
    """Return the line that says in the spec itself what it was made from.

    Not the fingerprint: it changes more often than what the spec says.
    """
    return f"# Made for driver {escape(driver_version)}, boot {escape(fingerprint.boot_id())}.\n"


def write(
    path: str, text: str, spec: Spec, *, driver_version: str, found: Fingerprint, chosen: Options
) -> None:
    """Write the stamp of *spec*, which is *text* at *path*; a warning if that cannot be."""
    mounts = spec.get("containerEdits", Edits()).get("mounts", [])
    stamp = Stamp(
        path=os.path.abspath(path),
        digest=_digest(text.encode()),
        driver_version=driver_version,
        boot_id=fingerprint.boot_id(),
        fingerprint=found,
        files=fingerprint.identities(mount["hostPath"] for mount in mounts),
        options=_plain(chosen),
    )
    try:
        store.save(_path(path), json.dumps(dataclasses.asdict(stamp)), may_trust=may_trust)
    except (OSError, CdiError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        text = f'cannot write below "{DIRECTORY}": {why}; "cdi refresh" will write the spec again'
        click.echo(f"warning: {escape(text)}", err=True)


def read(path: str) -> Stamp | None:
    """Return the stamp of the spec at *path*, if it is of this boot and the spec is as written.

    That is of the same bytes, and for consumers to use.
    """
    try:
        stamp = Stamp(**json.loads(store.read(_path(path))))
        digest = _digest(store.read(path).encode())
        spec, own = os.lstat(path), os.lstat(_path(path))
    except (OSError, ValueError, TypeError, RecursionError, CdiError):
        return None
    if not (may_trust(own) and may_trust(spec) and stat.S_ISREG(spec.st_mode)):
        return None
    if stat.S_IMODE(spec.st_mode) != store.SPEC_MODE or not _is_map(
        stamp.fingerprint, stamp.files
    ):
        return None
    if stamp.boot_id != fingerprint.boot_id() or stamp.digest != digest:
        return None
    return stamp


def _is_map(*values: object) -> bool:
    return all(isinstance(value, dict) for value in values)


def fits(stamp: Stamp, found: Fingerprint, chosen: Options) -> bool:
    """Tell whether nothing that the spec was made from has changed."""
    plain: Fingerprint = json.loads(json.dumps(found))
    if stamp.fingerprint != plain or stamp.options != _plain(chosen):
        return False
    # A file that was written to in place changes no directory.
    return fingerprint.identities(stamp.files) == stamp.files


def _plain(chosen: Options) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(chosen)))
    return plain


def _path(spec_path: str) -> str:
    name = hashlib.sha256(os.fsencode(os.path.abspath(spec_path))).hexdigest()[:32]
    return f"{DIRECTORY}/{name}.json"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
