# SPDX-License-Identifier: Apache-2.0
"""Checks of CDI specs: can they be read, by whom, do they fit the driver, do their hooks work."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterator, Sequence

from cdi import conflicts, generate, registry, version, yamlio
from cdi.errors import CdiError
from cdi.registry import ENDINGS, Registry
from cdi.wire import Edits, Hook, Spec
from gpuruntime import config as settings
from gpuruntime import probes
from gpuruntime.cli import spec_dirs, stamp
from gpuruntime.cli import system_devices as devices
from gpuruntime.cli.checks import driver_checks, engine_files, readers
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import Note, fail, ok, warn
from gpuruntime.formats import driver_version
from gpuruntime.trusted_files import may_trust

# Where people have put specs that no engine looks for.
_NOWHERE = (
    "/usr/share/cdi",
    "/usr/local/etc/cdi",
    "/etc/containers/cdi",
    "/etc/cdi.d",
    "/var/cdi",
    "/var/lib/cdi",
    "/etc/docker/cdi",
    "/etc/containerd/cdi",
)
_REFRESH = 'run "gpuruntime cdi refresh"'
_OUTPUT = ("/var/run/cdi/nvidia.yaml", "/run/cdi/nvidia.yaml")
_ALL_READ = 0o444
VERSIONED = ("libcuda.so.", "libnvidia-ml.so.")
# A file may have gone, as a socket that a daemon makes, without the spec being another driver's.
_MAX_NAMED = 3


def load_specs(machine: ExaminedMachine) -> Registry:
    """Return the specs of the configured directories, by the paths that they have for us."""
    return registry.load(
        [_place(machine, path) for path in machine.config.spec_dirs],
        may_trust=may_trust,
        decode_yaml=yamlio.decode_all,
    )


def _place(machine: ExaminedMachine, directory: str) -> str:
    """Return where *directory* is for us; in a tree, links on the way are not to lead out."""
    if machine.is_live:
        return directory
    return machine.path(machine.real(directory) or directory)


def _name(machine: ExaminedMachine, path: str) -> str:
    """Return the path that *path* of ours has on the machine."""
    return path if machine.is_live else path.removeprefix(machine.root)


def _refresh(path: str, *options: str) -> str:
    """Return what to do so that the spec at *path* is made anew."""
    words = ["gpuruntime cdi refresh", *options]
    return f'run "{" ".join(words if path in _OUTPUT else [*words, "--output", path])}"'


def ours(machine: ExaminedMachine, specs: Registry) -> list[tuple[str, Spec]]:
    """Return path and document of the specs of NVIDIA's kinds."""
    vendor = machine.config.default_kind.partition("/")[0]
    return [
        (file.path, file.spec)
        for file in specs.files
        if file.spec is not None and file.spec["kind"].partition("/")[0] == vendor
    ]


def directories(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether specs are where engines look, and those directories can be read by them."""
    wanted = machine.config.spec_dirs
    yield from _elsewhere(machine, wanted)
    for directory in wanted:
        status = machine.status(directory)
        if status is None:
            continue
        if not stat.S_ISDIR(status.st_mode):
            yield fail(f'"{directory}" is no directory', "put a directory there")
            continue
        if machine.link(directory) is not None:
            yield warn(
                f'"{directory}" is a link: podman, containerd and docker before 29 pass over it',
                "make it a directory, and put the specs there",
            )
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o055 != 0o055:
            yield warn(
                f'"{directory}" has mode {mode:04o}: engines without root cannot read it',
                f'run "chmod 755 {directory}"',
            )
    for engine in engine_files.installed_engines(machine):
        missing = [path for path in _with_specs(machine) if not _reads(engine.spec_dirs, path)]
        if engine.spec_dirs and missing:
            yield fail(
                f'"{missing[0]}" has specs, and {engine.name} looks in '
                f"{', '.join(engine.spec_dirs)} only",
                f'add it to the spec directories in "{engine.paths[0]}"',
            )
    yield ok(", ".join(wanted))


def _with_specs(machine: ExaminedMachine) -> list[str]:
    return [
        path
        for path in machine.config.spec_dirs
        if any(name.endswith(ENDINGS) for name in machine.names(path))
    ]


def _reads(spec_dirs: Sequence[str], path: str) -> bool:
    same = {"/var/run/cdi": "/run/cdi"}
    return same.get(path, path) in {same.get(item, item) for item in spec_dirs}


def _elsewhere(machine: ExaminedMachine, wanted: Sequence[str]) -> Iterator[Note]:
    places = {machine.real(path) for path in wanted}
    for directory in (*_NOWHERE, "/run/cdi", "/var/run/cdi"):
        if directory in wanted or machine.real(directory) in places:
            continue
        found = [name for name in machine.names(directory) if name.endswith(ENDINGS)]
        if found:
            yield warn(
                f'"{directory}/{found[0]}" is where nobody looks for specs',
                f'move it to "{wanted[-1] if wanted else "/etc/cdi"}"',
            )


def files(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether each spec can be used: its name, its content, who may read and write it."""
    specs = load_specs(machine)
    for file in specs.files:
        if file.error is not None:
            yield fail(
                f'"{_name(machine, file.path)}" is not used: {file.error.category}: {file.error}',
                f'run "gpuruntime cdi validate {_name(machine, file.path)}" and correct it',
            )
    maintained = [_place(machine, path) for path in spec_dirs.MAINTAINED]
    for conflict in conflicts.find(specs.files, maintained):
        stale, kept = _name(machine, conflict.stale), _name(machine, conflict.kept)
        yield fail(
            f'"{stale}" and "{kept}" both define {conflicts.some(conflict.names)}: what two files '
            "of one directory define resolves nowhere",
            f'remove "{stale}"',
        )
    for directory in machine.config.spec_dirs:
        for name in machine.names(directory):
            yield from _file(machine, f"{directory}/{name}")
    count = sum(file.spec is not None for file in specs.files)
    if count:
        yield ok(f"{count} with {len(specs.devices)} device(s)")
        return
    text = "no CDI spec: devices can be asked for by variables and mounts, not by names of CDI"
    asks = [item.name for item in readers.installed(machine) if item.name == "podman"]
    if machine.config.mode == settings.CDI or asks:
        yield warn(text, _REFRESH)
    else:
        yield ok(text)


def _file(machine: ExaminedMachine, path: str) -> Iterator[Note]:
    status, link = machine.status(path), machine.link(path)
    if path.endswith(".yml"):
        yield warn(
            f'"{path}" is not read: names end in .yaml or .json',
            f'rename it to "{path.removesuffix(".yml")}.yaml"',
        )
    elif not path.endswith(ENDINGS):
        return
    elif status is None and link is not None:
        yield fail(f'"{path}" is a link to nothing', f"remove it, or {_refresh(path)}")
    elif status is not None and stat.S_IMODE(status.st_mode) & _ALL_READ != _ALL_READ:
        yield warn(
            f'"{path}" has mode {stat.S_IMODE(status.st_mode):04o}: engines without root cannot '
            "read it",
            f'run "chmod 644 {path}"',
        )


def fresh(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether the specs are of the driver, the nodes and the MIG devices that there are."""
    found = ours(machine, load_specs(machine))
    for path, spec in found:
        yield from _stale(machine, _name(machine, path), spec)
        if machine.is_live:
            yield from _changed(path)
    if found:
        refresh = _refresh(_name(machine, found[0][0]))
        yield from _migs(machine, [spec for _, spec in found], refresh)
    yield ok("of the host as it is" if found else "no spec of NVIDIA's devices")


def _edits(spec: Spec) -> list[Edits]:
    own = spec.get("containerEdits") or Edits()
    return [own, *(device["containerEdits"] for device in spec["devices"])]


def _stale(machine: ExaminedMachine, path: str, spec: Spec) -> Iterator[Note]:
    loaded = driver_checks.loaded(machine)
    gone = []
    for mount in (mount for edits in _edits(spec) for mount in edits.get("mounts") or ()):
        source = mount["hostPath"]
        name = posixpath.basename(source)
        made_for = driver_version.of_name(name) if name.startswith(VERSIONED) else ""
        if loaded and made_for and made_for != loaded:
            yield fail(
                f'"{path}" is for driver {made_for}, and {loaded} is loaded', _refresh(path)
            )
            return
        if source.startswith("/") and machine.status(source) is None:
            gone.append(source)
    if gone:
        yield fail(
            f'"{path}" has files that are gone: {", ".join(gone[:_MAX_NAMED])}', _refresh(path)
        )
    for node in (node for edits in _edits(spec) for node in edits.get("deviceNodes") or ()):
        source = node.get("hostPath") or node["path"]
        status = machine.status(source)
        if status is None:
            yield fail(f'"{path}" has the node "{source}", which is not there', _refresh(path))
        elif node.get("major") and (node["major"], node.get("minor", 0)) != (
            os.major(status.st_rdev),
            os.minor(status.st_rdev),
        ):
            yield fail(
                f'"{path}" has "{source}" as {node["major"]}:{node.get("minor", 0)}, which is '
                "another device in this boot",
                _refresh(path),
            )


def _changed(path: str) -> Iterator[Note]:
    """Compare the host with what the spec's stamp says that it was."""
    made = stamp.read(path)
    changed = probes.changed(made.fingerprint) if made is not None else []
    if changed:
        yield warn(
            f'since "{path}" was written these have changed: {", ".join(changed)}', _refresh(path)
        )


def _migs(machine: ExaminedMachine, specs: Sequence[Spec], refresh: str) -> Iterator[Note]:
    """Compare the MIG devices of *specs* with those that there are, by the nodes of both."""
    minors = devices.mig_minors(machine.read("/proc/driver/nvidia-caps/mig-minors") or "")
    there = [
        name
        for name in devices.existing_instances(machine.path("/proc"))
        if name.startswith("gpu") and name in minors
    ]
    named = {
        posixpath.basename(node["path"])
        for spec in specs
        for edits in _edits(spec)
        for node in edits.get("deviceNodes") or ()
    }
    # A GPU instance without compute instances is no device yet.
    usable = [name for name in there if "/ci" in name]
    missing = [name for name in usable if f"nvidia-cap{minors[name]}" not in named]
    if missing:
        yield fail(f"no spec has the MIG instance {_short(missing[0])}", refresh)
    wanted = {f"nvidia-cap{minors[name]}" for name in there}
    capabilities = {name for name in named if name.startswith("nvidia-cap")}
    others = capabilities - wanted - {f"nvidia-cap{minors.get(n)}" for n in ("config", "monitor")}
    if minors and others:
        yield fail(f'a spec has "{min(others)}", of a MIG instance that is gone', refresh)


def _short(capability: str) -> str:
    return capability.removesuffix("/access")


def readable(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether the installed engines know the versions that the specs are written in."""
    engines = list(readers.installed(machine))
    for path, spec in ours(machine, load_specs(machine)):
        for engine in engines:
            if engine.newest and not engine.reads(spec["cdiVersion"]):
                newest = ".".join(map(str, engine.newest))
                yield fail(
                    f'"{_name(machine, path)}" is of CDI {spec["cdiVersion"]}{_because(spec)}, '
                    f"and {engine.name} {engine.version} reads up to {newest}",
                    _refresh(_name(machine, path), "--force", "--max-spec-version", newest),
                )
    told = [
        f"{engine.name} {engine.version}"
        + (f" reads CDI {'.'.join(map(str, engine.newest))}" if engine.newest else " reads none")
        for engine in engines
    ]
    yield ok(", ".join(told) or "no engine of known version")


def _because(spec: Spec) -> str:
    """Return what in *spec* needs that version, "" if something older would do."""
    needed = version.minimum(spec)
    if needed != spec["cdiVersion"]:
        return f", though {needed} would do"
    try:
        _, dropped = generate.lower(spec, "0.5.0")
    except CdiError:
        return ""
    return f" ({dropped[0]})" if dropped else ""


def hooks(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether the specs' hooks can be run, and do not run with a container's variables."""
    count = 0
    for file in load_specs(machine).files:
        where = _name(machine, file.path)
        for edits in _edits(file.spec) if file.spec is not None else ():
            for hook in edits.get("hooks") or ():
                count += 1
                yield from _hook(machine, where, hook)
    yield ok(f"{count} hook(s)")


def _hook(machine: ExaminedMachine, where: str, hook: Hook) -> Iterator[Note]:
    path = hook["path"]
    if hook.get("hookName") != "startContainer" and not machine.is_program(path):
        yield fail(
            f'the hook "{path}" of "{where}" is no program on this host',
            f"{_refresh(where, '--force')}, or install what it belongs to",
        )
    if not hook.get("env"):
        yield warn(
            f'the hook "{path}" of "{where}" has no env: some low-level runtimes start it with '
            "variables of the image",
            _refresh(where, "--force"),
        )
    yield from _ldconfig(machine, where, hook.get("args") or [])


def _ldconfig(machine: ExaminedMachine, where: str, words: Sequence[str]) -> Iterator[Note]:
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option != "--ldconfig-path":
            continue
        path = value if equals else "".join(words[index + 1 : index + 2])
        if path.startswith("/") and not machine.is_program(path):
            yield fail(
                f'a hook of "{where}" has "--ldconfig-path {path}", which is no program on this '
                "host",
                _refresh(where, "--force"),
            )
