# SPDX-License-Identifier: Apache-2.0
"""`gpu-node mps-daemon`: the control daemons of the resources that MPS shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from gpunode import service_log
from gpunode.cli.device_plugin import config_loader, service_options, setting_options

if TYPE_CHECKING:
    from gpunode.services.mps_daemon import MpsDaemon
    from gpunode.services.observation import Watch
    from gpunode.services.surroundings import Surroundings


@click.command()
@setting_options
@service_options
@click.pass_context
def mps_daemon(ctx: click.Context, /, *, log_format: str, **_: Any) -> None:  # noqa: ANN401
    """Run the MPS control daemons of the GPUs that the config shares by MPS.

    The options and the config file are those of the device plugin. SIGHUP reads the config file
    again, and restarts the daemons whose GPUs or limits have changed; SIGTERM stops all of them,
    and restores the compute mode of the GPUs.
    """
    service_log.start(log_format)
    import asyncio  # noqa: PLC0415 (--help and errors do not need the service)

    from gpunode.services import standalone  # noqa: PLC0415
    from gpunode.services.observation import watcher  # noqa: PLC0415

    async def serve() -> None:
        await standalone.run(service(ctx, watcher), ctx.params["healthz"])

    asyncio.run(serve())


def agent_service(ctx: click.Context, surroundings: Surroundings) -> MpsDaemon:
    """Return the service of the options in *ctx* for the agent; raise as `service` does."""
    return service(ctx, surroundings.watch, surroundings.config_path)


def service(
    ctx: click.Context, watch: Watch, config_path: Callable[[], str] | None = None
) -> MpsDaemon:
    """Return the service of the options in *ctx*; raise ArgumentError or ConfigError.

    *config_path* returns the path of the config file, None for that of the options.
    """
    from gpunode.services.mps_daemon import MpsDaemon  # noqa: PLC0415

    load = config_loader(ctx, config_path)
    return MpsDaemon(load, watch=watch)
