# SPDX-License-Identifier: Apache-2.0
"""`gpu-node install` and `uninstall`: our OCI runtime on a host."""

from __future__ import annotations

import os
import signal
from typing import Any

import click

from gpunode.cli import options
from gpunode.install import bundle, installer, restart
from gpunode.install.installer import Options
from gpunode.install.restart import Restarter
from gpuruntime.engines import config_paths
from gpuruntime.errors import ArgumentError, escape

BUNDLE = "/usr/share/gpu-node/bundle"


# Of both commands.
_shared = options.together(
    click.option(
        "--host-root",
        default="/",
        envvar="HOST_ROOT_MOUNT",
        metavar="DIRECTORY",
        help="Where the root directory of the host is mounted.  [default: /]",
    ),
    click.option(
        "--install-dir",
        default=installer.TOP,
        envvar="TOOLKIT_INSTALL_DIR",
        metavar="DIRECTORY",
        help=f"Directory of the runtime on the host.  [default: {installer.TOP}]",
    ),
    click.option(
        "--restart-mode",
        type=click.Choice(restart.MODES),
        default=restart.NONE,
        envvar="RUNTIME_RESTART_MODE",
        help="How the engine is restarted after a change of its config.  [default: none]",
    ),
    click.option(
        "--restart-timeout",
        type=click.FloatRange(min=0),
        default=60.0,
        metavar="SECONDS",
        help="How long a restarted engine may take to answer.  [default: 60]",
    ),
    click.option(
        "--socket",
        default="",
        envvar=["RUNTIME_SOCKET", "CONTAINERD_SOCKET", "DOCKER_SOCKET"],
        metavar="PATH",
        help="The engine's socket, as a path of the host.  [default: the usual one]",
    ),
    click.option(
        "--stay",
        is_flag=True,
        envvar="GPU_NODE_STAY",
        help="Wait for SIGTERM afterwards, as a container of a DaemonSet must.",
    ),
)


@click.command()
@_shared
@click.option(
    "--bundle",
    "bundle_path",
    default=BUNDLE,
    envvar="GPU_NODE_BUNDLE",
    metavar="DIRECTORY",
    help=f"The unpacked bundle to install.  [default: {BUNDLE}]",
)
@click.option(
    "--runtime",
    "--engine",
    "engine",
    default="",
    envvar="RUNTIME",
    metavar="ENGINE",
    help=f"The engine: {', '.join(config_paths.names())}.  [default: the installed one]",
)
@click.option(
    "--config",
    default="",
    envvar=["RUNTIME_CONFIG", "CONTAINERD_CONFIG"],
    metavar="FILE",
    help="The engine's config file, as a path of the host.  [default: the usual one]",
)
@click.option(
    "--runtime-name",
    "name",
    default="gpuruntime",
    envvar=["NVIDIA_RUNTIME_NAME", "CONTAINERD_RUNTIME_CLASS", "DOCKER_RUNTIME_NAME"],
    metavar="NAME",
    help="Name of the runtime in the engine, the handler of the RuntimeClass.  "
    "[default: gpuruntime]",
)
@click.option(
    "--set-as-default",
    "is_default",
    is_flag=True,
    envvar=[
        "NVIDIA_RUNTIME_SET_AS_DEFAULT",
        "CONTAINERD_SET_AS_DEFAULT",
        "DOCKER_SET_AS_DEFAULT",
    ],
    help="Make it the default runtime.",
)
@click.option(
    "--enable-cdi",
    "has_cdi",
    is_flag=True,
    envvar="RUNTIME_ENABLE_CDI",
    help="Turn CDI on in the engine.",
)
def install(
    *,
    host_root: str,
    install_dir: str,
    restart_mode: str,
    restart_timeout: float,
    socket: str,
    stay: bool,
    bundle_path: str,
    **values: Any,  # noqa: ANN401 (by the option)
) -> None:
    """Install our OCI runtime on a host, and register it with the engine.

    A second call changes nothing; one with another bundle is an upgrade, which does not disturb
    containers. A call that was killed is finished by the next one.
    """
    options = Options(**values, top=_directory(install_dir))
    end = _deferred_signals() if stay else ()
    tree = bundle.open_tree(bundle_path)
    installer.enter(host_root)
    restarter = Restarter(restart_mode, restart_timeout, socket)
    installer.install(tree, options, restarter, _say)
    if end:
        signal.sigwait(end)


@click.command()
@_shared
def uninstall(
    *,
    host_root: str,
    install_dir: str,
    restart_mode: str,
    restart_timeout: float,
    socket: str,
    stay: bool,
) -> None:
    """Restore the engine's config files on a host, and remove our OCI runtime.

    Containers that run are not ended. New containers of the runtime cannot start.
    """
    options = Options(top=_directory(install_dir))
    end = _deferred_signals() if stay else ()
    installer.enter(host_root)
    installer.uninstall(options, Restarter(restart_mode, restart_timeout, socket), _say)
    if end:
        signal.sigwait(end)


def _deferred_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a container, which from now on arrive by `sigwait` only.

    The first process of a container gets no signal without that, and what was begun is finished.
    """
    signals = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    return signals


def _directory(path: str) -> str:
    normal = os.path.normpath(path)
    if not normal.startswith("/") or normal == "/" or not normal.isprintable() or '"' in normal:
        raise ArgumentError(
            f'--install-dir is "{path}", not an absolute path of a directory',
            f"use {installer.TOP}",
        )
    return normal


def _say(line: str) -> None:
    click.echo(escape(line), err=True)
