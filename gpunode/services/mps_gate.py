# SPDX-License-Identifier: Apache-2.0
"""Offer resources that MPS shares only while their control daemons answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from gpunode import mps_control
from gpunode.config.effective import Config
from gpunode.mps_control import MpsError

log = logging.getLogger(__name__)

_DEADLINE_S = 3.0


class MpsGate:
    """*problems* are the reasons why daemons do not answer, by the name of the resource.

    *lost* are the names of those that have answered before: their units are offered, as unhealthy.
    """

    def __init__(self, retry_s: float = 10.0, check_s: float = 30.0) -> None:
        """*retry_s*: how long to wait for a daemon that does not answer, *check_s*: for others."""
        self.retry_s = retry_s
        self.check_s = check_s
        self.problems: dict[str, str] = {}
        self._have_answered: set[tuple[str, str]] = set()
        self._root = ""
        self._due = 0.0

    @property
    def lost(self) -> set[str]:
        """The resources whose daemon has answered, and does so no longer."""
        return {name for name in self.problems if (self._root, name) in self._have_answered}

    async def check(self, names: Sequence[str], config: Config, now: float) -> float | None:
        """Ask the daemons of *names*, if it is time to.

        Returns when that is repeated, None without names.
        """
        self._root = mps_control.directory(config)
        for name in [name for name in self.problems if name not in names]:
            del self.problems[name]
        if not names:
            return None
        is_new = any(
            name not in self.problems and (self._root, name) not in self._have_answered
            for name in names
        )
        if is_new or now >= self._due:
            await asyncio.gather(*(self._ask(name, config) for name in names))
            self._due = now + (self.retry_s if self.problems else self.check_s)
        return self._due

    async def _ask(self, name: str, config: Config) -> None:
        try:
            answer = await mps_control.ask(config, name, mps_control.QUESTION, _DEADLINE_S)
            _check(name, answer)
        except MpsError as error:
            if self.problems.get(name) != str(error):
                log.warning("waiting for the MPS control daemon: %s", error.lines())
            self.problems[name] = str(error)
        else:
            if self.problems.pop(name, None) is not None:
                log.info("%s: the MPS control daemon answers", name)
            self._have_answered.add((self._root, name))


def _check(name: str, answer: str) -> None:
    """Raise MpsError if *answer* is not a percentage."""
    try:
        float(answer)
    except ValueError:
        raise MpsError(
            f'{name}: the MPS control daemon has answered "{answer[:80]}", not a percentage',
            "check its control.log",
        ) from None
