# SPDX-License-Identifier: Apache-2.0
"""`gpu-node install` and `uninstall`: the order of the steps.

The root directory of this process is then the host's, so that symlinks and the paths in configs
mean what they mean there. Nothing of the host is executed but systemctl, and that only if the
restart mode says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from gpunode.install import bundle, journal, registration
from gpunode.install.errors import InstallError
from gpunode.install.journal import Journal, Registered
from gpunode.install.registration import Runtime
from gpunode.install.restart import NONE, Restarter
from gpunode.install.versions import CURRENT, Versions
from gpuruntime.engines import files

TOP = "/opt/gpuruntime"


@dataclass(frozen=True, slots=True)
class Options:
    """The *engine* ("": the installed one), its *config* ("": the usual file), and the runtime."""

    engine: str = ""
    config: str = ""
    name: str = "gpuruntime"
    is_default: bool = False
    has_cdi: bool = False
    top: str = TOP


Say = Callable[[str], None]


def enter(host_root: str) -> None:
    """Make *host_root* the root directory of this process; raise InstallError."""
    if host_root == "/":
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            raise InstallError(
                "this is a pod, and --host-root is its own root directory",
                "mount the host's root directory, and name the mount: --host-root /host",
            )
        return
    try:
        os.chroot(host_root)
        os.chdir("/")
    except OSError as error:
        raise InstallError(
            f'cannot change to the host root "{host_root}": {error.strerror}',
            "run as root, and name the directory where the host's root is mounted",
        ) from error
    if not os.path.isdir("/etc"):
        raise InstallError(
            f'"{host_root}" is not the root of a host: it has no "etc"',
            "name the directory where the host's root is mounted",
        )


def install(tree: int, options: Options, restarter: Restarter, say: Say) -> None:
    """Install the bundle *tree* and register it; what is as it must be is left alone.

    Raises InstallError and ConfigError. The next call finishes what failed or was killed.
    """
    engine = registration.choose(options.engine, options.config)
    restarter.check(engine)
    name = bundle.name_of(tree)
    versions = Versions(options.top)
    runtime = Runtime(
        options.name,
        f"{options.top}/{CURRENT}/{bundle.RUNTIME}",
        is_default=options.is_default,
        has_cdi=options.has_cdi,
    )
    chosen = Registered(engine, options.name, options.config)
    # Before anything is written: a config that cannot be edited ends the command here.
    registration.plan(chosen, runtime)
    with _system_errors(options.top), _locked(options.top, is_made=True) as before:
        record = before
        added = versions.add(tree, name)
        previous = versions.current()
        switched = versions.switch(name)
        if added or switched:
            say(f'installed version {name} in "{options.top}"')
        plan = registration.plan(chosen, runtime)
        for note in plan.notes:
            say(f"note: {note}")
        old = record.get(chosen.key)
        must_restart = not plan.is_empty or (old is not None and old.must_restart)
        chosen = replace(chosen, must_restart=must_restart)
        if chosen != old:
            record = record.with_registered(chosen)
            journal.store(options.top, record)
        for line in registration.carry_out(plan):
            say(line)
        _restart(options.top, record, chosen, restarter, say)
        for gone in versions.prune({name, previous}) if switched else ():
            say(f"removed version {gone}")


def uninstall(options: Options, restarter: Restarter, say: Say) -> None:
    """Restore the configs of all engines, and remove all versions.

    Raises InstallError and ConfigError. The next call finishes what failed or was killed.
    """
    if not os.path.isdir(options.top):
        say(f'nothing is installed in "{options.top}"')
        return
    path = f"{options.top}/{CURRENT}/{bundle.RUNTIME}"
    with _system_errors(options.top), _locked(options.top, is_made=False) as before:
        record = before
        for registered in before.registered:
            restarter.check(registered.engine)
        for registered in before.registered:
            plan = registration.plan_removal(registered, path)
            due = replace(registered, must_restart=registered.must_restart or not plan.is_empty)
            if due != registered:
                record = record.with_registered(due)
                journal.store(options.top, record)
            for line in registration.carry_out_removal(plan):
                say(line)
            _restart(options.top, record, due, restarter, say)
            record = record.without(due)
            journal.store(options.top, record)
        Versions(options.top).remove()
        journal.remove(options.top)
        say(f'removed "{options.top}"')
        for directory in (options.top, *reversed(record.directories)):
            with contextlib.suppress(OSError):
                os.rmdir(directory)


def _restart(
    top: str, record: Journal, registered: Registered, restarter: Restarter, say: Say
) -> None:
    """Restart the engine of *registered* if its config has changed since its last restart."""
    if not registered.must_restart:
        return
    command = registration.restart_command(registered.engine)
    if restarter.mode != NONE:
        restarter.restart(registered.engine)
        say(f"restarted {registered.engine}")
    elif command:
        say(f'to put it into effect, run "{command}" on the host')
    journal.store(top, record.with_registered(replace(registered, must_restart=False)))


@contextlib.contextmanager
def _locked(top: str, *, is_made: bool) -> Iterator[Journal]:
    """Have the installation in *top* for this process alone; yield its journal."""
    created = files.missing_directories(f"{top}/{CURRENT}") if is_made else []
    os.makedirs(top, 0o755, exist_ok=True)
    directory = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InstallError(
                f'another process installs or removes "{top}"', "wait until it has ended"
            ) from error
        files.remove_leftovers(top)
        record = journal.load(top)
        if record is None:
            # Only what this call has created: the directory itself is removed in any case.
            record = Journal(directories=tuple(path for path in created if path != top))
            if is_made:
                journal.store(top, record)
        yield record
    finally:
        os.close(directory)


@contextlib.contextmanager
def _system_errors(top: str) -> Iterator[None]:
    """Turn the errors of system calls into InstallError."""
    try:
        yield
    except OSError as error:
        where = f' "{error.filename}"' if error.filename else ""
        raise InstallError(
            f'cannot change the installation in "{top}":{where} {error.strerror}',
            "run as root, with the host's root mounted writable; the next call continues",
        ) from error
