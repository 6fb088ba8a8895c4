# SPDX-License-Identifier: Apache-2.0
"""Read a single CDI spec; shared by commands that work on one."""

from __future__ import annotations

from cdi import document, store, version, yamlio
from cdi.errors import CdiError
from cdi.wire import Spec
from gpuruntime.errors import SpecError


def load(name: str) -> Spec:
    """Return the checked document of the file *name*, "-" for standard input; raise SpecError.

    A document without a version gets the lowest version that it needs.
    """
    source = "standard input" if name == "-" else f'"{name}"'
    try:
        spec = document.normalise(yamlio.decode(store.read(0 if name == "-" else name)))
        if isinstance(spec, dict) and not spec.get("cdiVersion"):
            checked = document.check({**spec, "cdiVersion": version.KNOWN[-1]})
            checked["cdiVersion"] = version.minimum(checked)
            return checked
        return document.check(spec)
    except CdiError as error:
        raise SpecError(
            f"cannot use {source}: {error.category}: {error}",
            'run "gpuruntime cdi validate" on it to see every problem',
        ) from error
    except OSError as error:
        raise SpecError(
            f"cannot read {source}: {error.strerror}", "name a file that can be read"
        ) from error
