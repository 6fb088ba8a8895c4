# SPDX-License-Identifier: Apache-2.0
"""The device list strategies in force: those of the config, or what the engine supports."""

from __future__ import annotations

import logging
import os

from gpunode import engine
from gpunode.config import settings
from gpunode.config.effective import Config
from gpunode.engine import Engine
from gpunode.kubelet import engine_client
from gpunode.kubelet.engine_client import EngineError
from gpuruntime.cli import config_in_force
from gpuruntime.errors import ConfigError

log = logging.getLogger(__name__)

_MAX_STATE = 1 << 20


class DeliveryChoice:
    """The *strategies*, and the *reason* for them; *problems* say which of them cannot work.

    The engine is asked once. Until it answers, `auto` is the environment.
    """

    def __init__(self, config: Config) -> None:
        self._socket = config.cri_socket
        kubelet = os.path.dirname(os.path.dirname(config.kubelet_socket))
        self._cpu_manager_state = os.path.join(kubelet, "cpu_manager_state")
        self._passes_specs = config.pass_device_specs
        self._is_automatic = settings.AUTO in config.device_list_strategy
        is_forced = not self._is_automatic
        self.strategies = config.device_list_strategy if is_forced else (settings.ENVVAR,)
        self.reason = "as configured" if is_forced else ""
        self.problems: tuple[str, ...] = ()
        self.is_made = False

    async def make(self) -> None:
        """Ask the engine; if it does not answer, `auto` must be chosen again later."""
        paths = [self._socket] if self._socket else engine_client.sockets_of()
        node_engine: Engine | None = None
        problem = ""
        if paths or self._is_automatic:
            try:
                node_engine = await engine_client.ask(paths)
            except EngineError as error:
                problem = f"{error}; {error.hint}"
        if not self._is_automatic:
            # If the engine does not answer, nothing speaks against the configured strategies.
            of_engine = engine.problems(self.strategies, node_engine) if node_engine else []
            self.problems = (*of_engine, *self._losses())
            self.is_made = True
            return
        choice = engine.choose(node_engine, accepts_mounts=_accepts_mounts())
        self.is_made = node_engine is not None
        self.problems = () if choice.works else (problem or choice.reason,)
        if choice.reason != self.reason:
            sentence = f"devices are delivered by {', '.join(choice.strategies)}: {choice.reason}"
            log.log(logging.INFO if choice.works else logging.WARNING, "%s", sentence)
        self.strategies, self.reason = choice.strategies, choice.reason
        self.problems += self._losses()

    def _losses(self) -> tuple[str, ...]:
        """Return a sentence if containers lose their GPUs when the kubelet updates them."""
        try:
            with open(self._cpu_manager_state, encoding="utf-8", errors="replace") as stream:
                state = stream.read(_MAX_STATE)
        except OSError:
            return ()
        sentence, action = engine.lost_by_updates(
            self.strategies, state, passes_specs=self._passes_specs
        )
        return (f"{sentence}; {action}",) if sentence else ()


def _accepts_mounts() -> bool:
    """Return whether our OCI runtime reads device lists in mounts."""
    try:
        return config_in_force.load().accept_mounts
    except ConfigError:
        return False
