# SPDX-License-Identifier: Apache-2.0
"""Add devices to an OCI config: resolve, complete, apply; CDI SPEC.md, "Container edits"."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable

from cdi.complete import complete
from cdi.edits import apply
from cdi.registry import Registry
from cdi.wire import OciConfig


def inject(
    registry: Registry,
    names: Iterable[str],
    config: OciConfig,
    lstat: Callable[[str], os.stat_result] = os.lstat,
) -> OciConfig:
    """Return a copy of *config* with the devices *names* of *registry* added; all or nothing.

    Raises CdiError "unresolvable" and those of `complete`. *lstat* returns the status of the
    host's device nodes. Members of *config* that OCI does not define are kept. Nodes are not bound
    in user namespaces, as with the reference library; runc then chooses the device by its path.
    """
    edits = complete(registry.resolve(names), lstat)
    result = copy.deepcopy(config)
    apply(edits, result)
    return result
