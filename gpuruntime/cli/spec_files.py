# SPDX-License-Identifier: Apache-2.0
"""Shared by commands that work on single CDI spec files: reading one."""

from __future__ import annotations

from cdi import document, store, version, yamlio
from cdi.errors import CdiError
from cdi.wire import Spec
from gpuruntime.errors import SpecError


def load(name: str) -> Spec:
    """Return the checked document of the file *name*, "-" for standard input; raise SpecError.

    Where it claims no version at all, it gets the one that it needs.
    """
    called = "standard input" if name == "-" else f'"{name}"'
    try:
        found = document.normalise(yamlio.decode(store.read(0 if name == "-" else name)))
        if isinstance(found, dict) and not found.get("cdiVersion"):
            checked = document.check({**found, "cdiVersion": version.KNOWN[-1]})
            checked["cdiVersion"] = version.minimum(checked)
            return checked
        return document.check(found)
    except CdiError as error:
        raise SpecError(
            f"cannot use {called}: {error.category}: {error}",
            'run "gpuruntime cdi validate" on it to see every problem',
        ) from error
    except OSError as error:
        raise SpecError(
            f"cannot read {called}: {error.strerror}", "name a file that can be read"
        ) from error
