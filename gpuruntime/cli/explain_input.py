# SPDX-License-Identifier: Apache-2.0
"""Read the OCI config that `gpuruntime explain` explains, wherever it comes from."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from cdi import names, reasons
from cdi.complete import complete, in_user_namespace
from cdi.edits import apply
from cdi.errors import CdiError
from cdi.wire import OciConfig
from gpuruntime.cli.explain_host import ExplainHost
from gpuruntime.errors import BundleError, RequestError, UnresolvedDeviceError
from gpuruntime.oci.bundle import CONFIG_NAME, MAX_CONFIG_BYTES, Bundle
from gpuruntime.request.container import shortened


class Text(Bundle):
    """A config.json that is in no bundle, as *data* from where *path* says."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        self.data = data


def of_file(path: str) -> Bundle:
    """Return the config.json *path*, which is standard input if that is `-`; raise BundleError."""
    if path == "-":
        return Text("standard input", _read_stdin())
    directory, name = os.path.split(path)
    if not name:
        raise BundleError(f'cannot read "{path}": Is a directory', 'use "--bundle" for a bundle')
    return Bundle(directory, name)


def of_bundle(path: str) -> Bundle:
    """Return the config.json of the bundle *path*; raise BundleError."""
    return Bundle(path, CONFIG_NAME)


def add_by_engine(document: OciConfig, devices: Sequence[str], host: ExplainHost) -> list[str]:
    """Do to *document* what an engine does for `--device` with a name of CDI; say from where.

    The engine reads the specs itself, before the runtime sees config.json. Raises RequestError
    and UnresolvedDeviceError.
    """
    if not devices:
        return []
    known = host.read_registry()
    told = []
    for name in devices:
        if not names.is_qualified(name):
            raise RequestError(
                f'--device "{shortened(name)}" is no name of CDI',
                'write it as "nvidia.com/gpu=0"; devices of the host are up to the engine',
            )
        file = known.find(name)
        if file is None:
            raise UnresolvedDeviceError(
                f'the engine cannot add "{name}": {reasons.why_unresolved(known, name)}',
                'ask for names that "gpuruntime cdi list" shows',
            )
        told.append(
            f'the engine itself adds "{name}", from the CDI spec "{file.path}"; '
            "what the runtime adds is beside that"
        )
    try:
        edits = complete(known.resolve(devices), user_namespace=in_user_namespace(document))
    except CdiError as error:
        raise UnresolvedDeviceError(
            f"the engine cannot add a device: {error}",
            "load the driver of the device, or write the spec again",
        ) from error
    apply(edits, document)
    return told


def encoded(document: OciConfig) -> Bundle:
    """Return *document* as the engine would hand it on."""
    return Text("the options", json.dumps(document).encode())


def _read_stdin() -> bytes:
    data = b""
    try:
        while len(data) <= MAX_CONFIG_BYTES:
            chunk = os.read(0, MAX_CONFIG_BYTES + 1 - len(data))
            if not chunk:
                return data
            data += chunk
        why = f"larger than {MAX_CONFIG_BYTES} bytes"
    except OSError as error:
        why = str(error.strerror)
    raise BundleError(
        f"cannot read standard input: {why}",
        'give it the config.json of a bundle, as in "explain < config.json"',
    )
