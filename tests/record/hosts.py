# SPDX-License-Identifier: Apache-2.0
"""The simulated hosts, and what is recorded on each. Those that take long come first."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import command_line
import creates
import engine_files
import reports
import specs

if TYPE_CHECKING:
    from recorder import Recorder

ALL_FEATURES = ("gds", "mofed", "gdrcopy", "nvswitch", "imex")
FEATURES = tuple(word for name in ALL_FEATURES for word in ("--feature", name))


class Host(NamedTuple):
    """Options of simhost.py, and what records groups of cases."""

    options: tuple[str, ...]
    groups: tuple[Callable[[Recorder], None], ...]


def _faulty(*faults: str, gpus: str = "2") -> Host:
    words = (word for fault in faults for word in ("--fault", fault))
    return Host(("--gpus", gpus, *words), (creates.refused,))


HOSTS = {
    "requests": Host(("--gpus", "2", "--mig", "1:2", *FEATURES), (creates.by_requests,)),
    "by-engines": Host((), (creates.by_engines,)),
    "configs": Host(("--gpus", "2", *FEATURES), (creates.by_configs,)),
    "specs": Host(("--gpus", "2", "--mig", "1:2", *FEATURES), (specs.generated, specs.read)),
    "engine-files": Host(("--gpus", "1"), (engine_files.samples, engine_files.absent)),
    "command-line": Host(
        ("--gpus", "2", "--mig", "1:1", "--feature", "imex"),
        (
            command_line.help_texts,
            command_line.refusals,
            command_line.container_cli,
            command_line.system,
            command_line.hooks,
        ),
    ),
    "reports": Host(
        ("--gpus", "2", "--mig", "1:1", "--feature", "imex"),
        (reports.reports, reports.configs, reports.explanations),
    ),
    "cdi-cases": Host(("--gpus", "1"), (specs.cases,)),
    "layouts": Host(("--gpus", "2"), (specs.layouts, specs.platforms, reports.broken_hosts)),
    "separate-root": Host(("--gpus", "2", "--separate-root"), (specs.separate,)),
    "driver-535": Host(
        ("--gpus", "1", "--version", "535.261.03", "--gpu-arch", "0:8.0"), (specs.plain,)
    ),
    "many": Host(("--gpus", "12", "--mig", "all:7"), (specs.plain,)),
    "init-fails": _faulty("init-fails 9"),
    "no-devices": _faulty("init-fails 6"),
    "hangs": Host(("--fault", "init-hangs"), (creates.hanging,)),
    "lost": _faulty("lost 1"),
    "no-uvm": _faulty("nonode nvidia-uvm*"),
    "no-nodes": _faulty("nonode nvidia*"),
    "old-nvml": _faulty("nosymbol nvmlDeviceGetMigMode"),
}
