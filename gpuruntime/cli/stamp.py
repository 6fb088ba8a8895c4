# SPDX-License-Identifier: Apache-2.0
"""The stamp of a generated CDI spec: the host state it was made from; kept until the next boot.

`cdi refresh` compares it with the host. A message about a spec that does not fit the driver can
say when the spec was made.
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
from gpuruntime import probes
from gpuruntime.cli.generator import GenerateOptions
from gpuruntime.discover import fingerprint
from gpuruntime.errors import escape
from gpuruntime.snapshots.storage import RUN_DIRECTORY
from gpuruntime.trusted_files import may_trust

_OPTIONS, _FILES = "options", "mounted files"
DIRECTORY = f"{RUN_DIRECTORY}/specs"


@dataclasses.dataclass(frozen=True, slots=True)
class Stamp:
    """What the spec at *path*, whose bytes have *digest*, was made from.

    *fingerprint* is the state of the host, of the files that the spec mounts as well.
    """

    path: str
    digest: str
    driver_version: str
    boot_id: str
    fingerprint: dict[str, Any]
    options: dict[str, Any]


def comment(driver_version: str) -> str:
    """Return the line that says in the spec itself what it was made from.

    Not the state of the host: it changes more often than what the spec says.
    """
    version = escape(driver_version) or "none"
    return f"# Made for driver {version}, boot {escape(fingerprint.boot_id())}.\n"


def write(
    path: str,
    text: str,
    spec: Spec,
    *,
    driver_version: str,
    found: dict[str, Any],
    chosen: GenerateOptions,
) -> None:
    """Write the stamp of *spec*, which is *text* at *path*; a warning if that cannot be."""
    mounts = spec.get("containerEdits", Edits()).get("mounts", [])
    # A file that is written to in place changes no directory.
    files = probes.identities(mount["hostPath"] for mount in mounts)
    stamp = Stamp(
        path=os.path.abspath(path),
        digest=_digest(text.encode()),
        driver_version=driver_version,
        boot_id=fingerprint.boot_id(),
        fingerprint={**found, _FILES: files},
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
    if stat.S_IMODE(spec.st_mode) != store.SPEC_MODE:
        return None
    if stamp.boot_id != fingerprint.boot_id() or stamp.digest != digest:
        return None
    return stamp


def changed(stamp: Stamp, chosen: GenerateOptions) -> list[str]:
    """Return the names of what has changed of that which the spec was made from; [] if nothing."""
    return [
        *([_OPTIONS] if stamp.options != _plain(chosen) else []),
        *probes.changed(stamp.fingerprint),
    ]


def _plain(chosen: GenerateOptions) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(chosen)))
    return plain


def _path(spec_path: str) -> str:
    name = hashlib.sha256(os.fsencode(os.path.abspath(spec_path))).hexdigest()[:32]
    return f"{DIRECTORY}/{name}.json"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
