# SPDX-License-Identifier: Apache-2.0
"""The stamp of a generated CDI spec: the host state it was made from; valid until the next boot.

`cdi refresh` compares it with the host. A message about a spec that does not match the driver
names the driver and the boot of the stamp.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from typing import Any, NamedTuple

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


class Stamp(NamedTuple):
    """The inputs of the spec at *path*, whose bytes have *digest*.

    *fingerprint* is the state of the host and of the files that the spec mounts.
    """

    path: str
    digest: str
    driver_version: str
    boot_id: str
    fingerprint: dict[str, Any]
    options: dict[str, Any]


def write(
    path: str,
    text: str,
    spec: Spec,
    *,
    driver_version: str,
    state: dict[str, Any],
    chosen: GenerateOptions,
) -> None:
    """Write the stamp of *spec*, which is *text* at *path*; a failure is only a warning."""
    mounts = spec.get("containerEdits", Edits()).get("mounts", [])
    # A write to an existing file does not change the identity of its directory.
    files = probes.identities(mount["hostPath"] for mount in mounts)
    stamp = Stamp(
        path=os.path.abspath(path),
        digest=_digest(text.encode()),
        driver_version=driver_version,
        boot_id=fingerprint.boot_id(),
        fingerprint={**state, _FILES: files},
        options=_plain(chosen),
    )
    try:
        store.save(_path(path), json.dumps(stamp._asdict()), may_trust=may_trust)
    except (OSError, CdiError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        text = f'cannot write below "{DIRECTORY}": {why}; "cdi refresh" will write the spec again'
        click.echo(f"warning: {escape(text)}", err=True)


def read(path: str) -> Stamp | None:
    """Return the stamp of the spec at *path*, None if there is none that is valid.

    A stamp is valid if it is of this boot, and if the spec has the same bytes, and an owner and
    mode that consumers accept.
    """
    try:
        stamp = Stamp(**json.loads(store.read(_path(path))))
        digest = _digest(store.read(path).encode())
        spec_status, stamp_status = os.lstat(path), os.lstat(_path(path))
    except (OSError, ValueError, TypeError, RecursionError, CdiError):
        return None
    if not (
        may_trust(stamp_status) and may_trust(spec_status) and stat.S_ISREG(spec_status.st_mode)
    ):
        return None
    if stat.S_IMODE(spec_status.st_mode) != store.SPEC_MODE:
        return None
    if stamp.boot_id != fingerprint.boot_id() or stamp.digest != digest:
        return None
    return stamp


def changed(stamp: Stamp, chosen: GenerateOptions) -> list[str]:
    """Return the names of the inputs of the spec that have changed."""
    return [
        *([_OPTIONS] if stamp.options != _plain(chosen) else []),
        *probes.changed(stamp.fingerprint),
    ]


def _plain(chosen: GenerateOptions) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(chosen._asdict()))
    return plain


def _path(spec_path: str) -> str:
    name = hashlib.sha256(os.fsencode(os.path.abspath(spec_path))).hexdigest()[:32]
    return f"{DIRECTORY}/{name}.json"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
