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
from typing import Any

import click

from cdi import store
from cdi.errors import CdiError
from gpuruntime import config
from gpuruntime.cli.generator import Options
from gpuruntime.discover import fingerprint
from gpuruntime.discover.fingerprint import Fingerprint
from gpuruntime.errors import escape
from gpuruntime.trust import may_trust

DIRECTORY = f"{config.RUN_DIRECTORY}/specs"
MAX_STAMP_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Stamp:
    """What the spec at *path*, whose bytes have *digest*, was made from."""

    path: str
    digest: str
    driver_version: str
    boot_id: str
    fingerprint: Fingerprint
    options: dict[str, Any]


def comment(driver_version: str, found: Fingerprint) -> str:
    """Return the line that says in the spec itself what it was made from."""
    boot = fingerprint.boot_id()
    parts = [f"driver {driver_version}", f"boot {boot}", fingerprint.digest(found)]
    return f"# Made for {', '.join(escape(part) for part in parts)}.\n"


def write(path: str, text: str, driver_version: str, found: Fingerprint, chosen: Options) -> None:
    """Write the stamp of the spec at *path*; a warning if that cannot be."""
    stamp = Stamp(
        path=os.path.abspath(path),
        digest=_digest(text.encode()),
        driver_version=driver_version,
        boot_id=fingerprint.boot_id(),
        fingerprint=found,
        options=_plain(chosen),
    )
    try:
        store.save(_path(path), json.dumps(dataclasses.asdict(stamp)), may_trust=may_trust)
    except (OSError, CdiError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        text = f'cannot write below "{DIRECTORY}": {why}; "cdi refresh" will write the spec again'
        click.echo(f"warning: {escape(text)}", err=True)


def read(path: str) -> Stamp | None:
    """Return the stamp of the spec at *path*, if it is of this boot and of these bytes."""
    try:
        with open(_path(path), "rb") as stream:
            if not may_trust(os.fstat(stream.fileno())):
                return None
            stamp = Stamp(**json.loads(stream.read(MAX_STAMP_BYTES)))
        with open(path, "rb") as stream:
            digest = _digest(stream.read())
    except (OSError, ValueError, TypeError):
        return None
    if stamp.boot_id != fingerprint.boot_id() or stamp.digest != digest:
        return None
    return stamp


def fits(stamp: Stamp, found: Fingerprint, chosen: Options) -> bool:
    """Tell whether nothing that the spec was made from has changed."""
    plain: Fingerprint = json.loads(json.dumps(found))
    return stamp.fingerprint == plain and stamp.options == _plain(chosen)


def _plain(chosen: Options) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(chosen)))
    return plain


def _path(spec_path: str) -> str:
    name = hashlib.sha256(os.fsencode(os.path.abspath(spec_path))).hexdigest()[:32]
    return f"{DIRECTORY}/{name}.json"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
