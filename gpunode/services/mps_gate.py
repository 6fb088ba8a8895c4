# SPDX-License-Identifier: Apache-2.0
"""Keep resources that MPS shares from the kubelet until their control daemons answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gpunode import mps_control
from gpunode.config.effective import Config
from gpunode.mps_control import MpsError

log = logging.getLogger(__name__)

_QUESTION = "get_default_active_thread_percentage"
_DEADLINE_S = 5.0


class MpsGate:
    """*problems* are the reasons why daemons do not answer, by the name of the resource."""

    def __init__(self, retry_s: float = 10.0) -> None:
        self.retry_s = retry_s
        self.problems: dict[str, str] = {}
        self._ready: set[tuple[str, str]] = set()
        self._due: float | None = None

    async def check(self, names: Sequence[str], config: Config, now: float) -> float | None:
        """Ask the daemons of *names* that have not answered yet, if it is time to.

        Returns when that is to be repeated, None if all have answered.
        """
        root = mps_control.directory(config)
        for name in [name for name in self.problems if name not in names]:
            del self.problems[name]
        pending = [name for name in names if (root, name) not in self._ready]
        is_new = any(name not in self.problems for name in pending)
        if not pending or (not is_new and self._due is not None and now < self._due):
            return self._due if pending else None
        for name in pending:
            try:
                answer = await mps_control.ask(config, name, _QUESTION, _DEADLINE_S)
                _check(name, answer)
            except MpsError as error:
                if self.problems.get(name) != str(error):
                    log.warning("waiting for the MPS control daemon: %s", error.lines())
                self.problems[name] = str(error)
            else:
                self.problems.pop(name, None)
                self._ready.add((root, name))
        self._due = now + self.retry_s if self.problems else None
        return self._due


def _check(name: str, answer: str) -> None:
    """Raise MpsError if *answer* is not a percentage."""
    try:
        float(answer)
    except ValueError:
        raise MpsError(
            f'{name}: the MPS control daemon has answered "{answer[:80]}", not a percentage',
            "check its control.log",
        ) from None
