# SPDX-License-Identifier: Apache-2.0
"""`prestart.py LOWLEVEL`: on the simulated host, containers whose files a prestart hook adds.

Prints one JSON object. Its cases: status, output and error of the create; "states": the
result of the hook for invalid container states.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from drivers import BIN, Bundle, proc_driver_hook, run
from scenario import CONFIG, WORK, main, nothing_left, without_unified
from ways import CAPABILITIES, MODE, REQUIREMENT

sys.path.append(str(Path(__file__).parents[1] / "hostile"))
import noted

HOOK = BIN / "gpu-container-runtime-hook"
# Under the name that an engine uses, our hook is not added a second time.
ENGINES = WORK / "nvidia-container-runtime-hook"
AUDITED = Path(__file__).with_name("audited.py")
LOADED = WORK / "loaded"
LOG = WORK / "hook.log"
DEBUG = "nvidia-container-cli.debug"
LIBRARIES = f"usr/lib/{os.uname().machine}-linux-gnu"
VERSION = "550.163.01"
CUDA = f"{LIBRARIES}/libcuda.so.{VERSION}"
FIRST_ID = 100000
SKIP = "nvidia-container-runtime-hook.skip-mode-detection"
COMPAT_MODE = "nvidia-container-runtime.modes.legacy.cuda-compat-mode"
COMPAT_OF_OLD = "features.allow-cuda-compat-libs-from-container"
NO_CGROUPS = "nvidia-container-cli.no-cgroups"
SECRET = "not for containers"

Prepare = Callable[[Path, dict[str, Any]], None]


class Bench(Bundle):
    """Bundles whose prestart hooks see /proc/driver, as with a real driver.

    *prepare* changes each bundle before the create.
    """

    def __init__(self, lowlevel: str) -> None:
        super().__init__(WORK, lowlevel)
        self.prepare: Prepare = nothing
        self.fakeproc = proc_driver_hook()
        self.said = WORK / "said"
        self.last = Path()

    def _make(self, env: list[str]) -> Path:
        self.last = super()._make(env)
        change(self.last, self._finish)
        return self.last

    def _finish(self, config: dict[str, Any]) -> None:
        config["hooks"]["prestart"] = [{"path": self.fakeproc}, *self.prestart]
        # crun writes the stderr of hooks to this file; runc adds it to its own error.
        config["annotations"] = {"run.oci.hooks.stderr": str(self.said)}
        del config["hooks"]["createRuntime"]
        self.prepare(self.last / "rootfs", config)

    def case(
        self,
        prepare: Prepare | None = None,
        *,
        devices: str | None = "1,3",
        more: Sequence[str] = (),
        plain: bool = False,
    ) -> dict[str, Any]:
        """Return the result of a container; *plain*: without our runtime."""
        self.prepare = prepare or nothing
        before = mounted()
        self.said.unlink(missing_ok=True)
        done = self.create(devices, plain=plain, more=more)
        return self.answer(done, before)

    def answer(self, done: subprocess.CompletedProcess[str], before: list[str]) -> dict[str, Any]:
        """Return the result of the function `answer`, with the stderr of hooks."""
        result = answer(done, before)
        if self.said.exists():
            result["error"] += self.said.read_text()
        return result

    def again(self, **config: object) -> dict[str, Any]:
        """Start another container on the last bundle, unchanged, without our runtime."""
        before = mounted()
        self.said.unlink(missing_ok=True)
        with configured({MODE: "legacy", **config}):
            name = f"again-{self.count}"
            done = run(self.lowlevel, "run", "--bundle", self.last, name, check=False)
            run(self.lowlevel, "delete", "--force", name, check=False)
        return self.answer(done, before)


def nothing(root: Path, config: dict[str, Any]) -> None:
    """Change nothing."""
    del root, config


def answer(done: subprocess.CompletedProcess[str], before: list[str]) -> dict[str, Any]:
    """Return the status and output of *done*, and the mounts on the host that *before* lacks."""
    return {
        "status": done.returncode,
        "output": done.stdout,
        "error": done.stderr,
        "mounted": [line for line in mounted() if line not in before],
    }


def mounted() -> list[str]:
    """Return the mounts of the host: root, mount point and options."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [" ".join(line.split()[3:6]) for line in lines]


def change(bundle: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Apply *edit* to the config.json of *bundle*."""
    path = bundle / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


@contextlib.contextmanager
def configured(config: Mapping[str, object]) -> Iterator[None]:
    """Write *config*, by key, to config.toml within the context."""
    CONFIG.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items()))
    try:
        yield
    finally:
        CONFIG.unlink()


# The root file systems of hostile images, and containers that share mounts or ids.


def link_at_a_library(root: Path, config: dict[str, Any]) -> None:
    """Replace a library by a link out of the root, which must resolve inside the root."""
    del config
    place_of(root / CUDA).symlink_to(f"../../../../../../../..{WORK}/secret")
    inside = Path(f"{root}{WORK}/secret")
    place_of(inside).write_text("the container's own")


def dangling_link(root: Path, config: dict[str, Any]) -> None:
    """Replace a library by a dangling link."""
    del config
    place_of(root / CUDA).symlink_to("/nowhere/at/all")


def link_to_a_new_file(root: Path, config: dict[str, Any]) -> None:
    """Replace a library by a link to a file that does not exist, in a directory of the host."""
    del config
    (WORK / "outside").mkdir(exist_ok=True)
    place_of(root / CUDA).symlink_to(f"{WORK}/outside/new")


def looping_link(root: Path, config: dict[str, Any]) -> None:
    """Replace a library by a link to itself."""
    del config
    place_of(root / CUDA).symlink_to(f"/{CUDA}")


def directory_at_a_library(root: Path, config: dict[str, Any]) -> None:
    """Replace a library by a directory."""
    del config
    (root / CUDA).mkdir(parents=True)


def fifo_at_a_library(root: Path, config: dict[str, Any]) -> None:
    """Replace a library by a FIFO: opening it blocks."""
    del config
    os.mkfifo(place_of(root / CUDA))


def libraries_lead_out(root: Path, config: dict[str, Any]) -> None:
    """Replace the library directory by a link out of the root."""
    del config
    place_of(root / "usr/share/x").touch()
    os.rename(root / "usr", root / "own")
    (root / "usr").symlink_to(f"../../../../../../..{WORK}/outside")
    (root / "bin/usr").symlink_to("/usr")
    (WORK / "outside").mkdir(exist_ok=True)
    os.renames(root / "own", f"{root}{WORK}/outside")


def read_only_libraries(root: Path, config: dict[str, Any]) -> None:
    """Mount a read-only volume on a library directory."""
    volume = root.parent / "volume"
    volume.mkdir()
    bind(config, volume, f"/{LIBRARIES}/gbm", "ro")


def shared_libraries(root: Path, config: dict[str, Any]) -> None:
    """Mount a shared volume on the library directory, with a link to another volume."""
    # Otherwise the mounts of the container are slaves of those of the host.
    propagates(root, config, "rshared")
    for name in ("volume", "other"):
        volume = root.parent / name
        volume.mkdir()
        run("mount", "--bind", volume, volume)
        run("mount", "--make-shared", volume)
    for name in (root / LIBRARIES).iterdir() if (root / LIBRARIES).exists() else ():
        run("cp", "-a", name, root.parent / "volume")
    place_of(root.parent / "other" / "cuda").touch()
    (root.parent / "volume" / Path(CUDA).name).symlink_to("/other/cuda")
    bind(config, root.parent / "volume", f"/{LIBRARIES}", "rshared")
    bind(config, root.parent / "other", "/other", "rshared")


def bind(config: dict[str, Any], source: Path, destination: str, *options: str) -> None:
    """Add a bind mount of *source* to the container."""
    config["mounts"].append(
        {
            "destination": destination,
            "type": "bind",
            "source": str(source),
            "options": ["rbind", *options],
        }
    )


def read_only(root: Path, config: dict[str, Any]) -> None:
    """Make the root read-only, as `docker run --read-only` does."""
    del root
    config["root"]["readonly"] = True


def propagates(root: Path, config: dict[str, Any], how: str) -> None:
    """Set the propagation of every mount to *how*."""
    del root
    config["linux"]["rootfsPropagation"] = how


def in_user_namespace(root: Path, config: dict[str, Any]) -> None:
    """Add a user namespace with its own ids."""
    run("chown", "-R", f"{FIRST_ID}:{FIRST_ID}", root)
    # crun starts the hook in the user namespace as well, where it lacks the privileges.
    config["hooks"]["prestart"] = [
        hook for hook in config["hooks"]["prestart"] if not hook["path"].endswith("/fakeproc")
    ]
    linux = config["linux"]
    linux["namespaces"].append({"type": "user"})
    ids = [{"containerID": 0, "hostID": FIRST_ID, "size": 65536}]
    linux["uidMappings"] = linux["gidMappings"] = ids


def with_cuda_of_its_own(root: Path, config: dict[str, Any]) -> None:
    """Add a CUDA compatibility library that supports the driver of the host."""
    del config
    place = place_of(root / "usr/local/cuda/compat/libcuda.so.575.57.08")
    note = root.parent / "note"
    text = json.dumps({"Format": 1, "CUDA Version": "12.9", "Driver": [535, 550, 570]})
    note.write_bytes(noted.note(text.encode()))
    source = f'.section {noted.SECTION.decode()},"a",@note\n.incbin "{note}"\n'
    words = ("-shared", "-nostdlib", "-Wl,-soname,libcuda.so.1", "-x", "assembler")
    assembly = root.parent / "note.s"
    assembly.write_text(source)
    run("gcc", *words, assembly, "-o", place)
    (place.parent / "libcuda.so.1").symlink_to(place.name)


def audited(root: Path, config: dict[str, Any]) -> None:
    """Record the files that the process of the hook opens."""
    with_cuda_of_its_own(root, config)
    command = [str(BIN / "python"), str(AUDITED), str(LOADED)]
    config["hooks"]["prestart"].append({"path": command[0], "args": command})


def place_of(path: Path) -> Path:
    """Create the directory of *path* and return *path*."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def unmount_volumes(bundle: Path) -> None:
    """Unmount the volumes of `shared_libraries`; fail if other mounts are on them."""
    for name in ("volume", "other"):
        run("umount", bundle / name)


def roots(bench: Bench) -> dict[str, Any]:
    """Start a container on each hostile root."""
    results = {}
    (WORK / "secret").write_text(SECRET)
    prepares = (
        *(link_at_a_library, dangling_link, link_to_a_new_file, looping_link),
        *(directory_at_a_library, fifo_at_a_library, libraries_lead_out, read_only_libraries),
        *(read_only, in_user_namespace, with_cuda_of_its_own),
    )
    for prepare in prepares:
        results[prepare.__name__] = bench.case(prepare)
    outside = WORK / "outside"
    left = [str(path.relative_to(outside)) for path in outside.rglob("*")]
    results["outside"] = {"secret": (WORK / "secret").read_text(), "left": left}
    return results


def shared(bench: Bench) -> dict[str, Any]:
    """Start containers that share mounts with the host."""
    run("mount", "--make-rshared", "/")
    try:
        results = {
            how: bench.case(partial(propagates, how=how)) for how in ("shared", "rshared", "slave")
        }
        results["volumes"] = bench.case(shared_libraries)
        unmount_volumes(bench.last)
    finally:
        run("mount", "--make-rprivate", "/")
    return results


def compat(bench: Bench, config: Mapping[str, object]) -> dict[str, Any]:
    """Start containers with a CUDA compatibility library, in each `cuda-compat-mode`."""
    results = {}
    for mode in ("mount", "hook", "disabled", ""):
        with configured({**config, COMPAT_MODE: mode}):
            results[mode] = bench.case(with_cuda_of_its_own)
    with configured({**config, COMPAT_MODE: "", COMPAT_OF_OLD: True}):
        results["of old"] = bench.case(with_cuda_of_its_own)
    return results


def play_mig() -> dict[str, Any]:
    """Start runc containers with a MIG device, and with the right to configure MIG."""
    CONFIG.parent.mkdir(exist_ok=True)
    bench = Bench("runc")
    bench.case(plain=True)
    results: dict[str, Any] = {}
    with nothing_left(results), configured({MODE: "legacy"}):
        results["device"] = bench.case(devices="0:1")
        results["configures"] = bench.case(devices="1", more=("NVIDIA_MIG_CONFIG_DEVICES=all",))
    return results


def hook_alone(bench: Bench) -> dict[str, Any]:
    """Start containers with the hook and without our runtime."""
    bench.prestart = [{"path": str(ENGINES), "args": [ENGINES.name, "prestart"]}]
    results = {}
    for mode in ("auto", "legacy", "cdi", "jit-cdi"):
        with configured({MODE: mode}):
            results[f"not granted, {mode}"] = bench.case(plain=True)
            results[f"unasked, {mode}"] = bench.case(plain=True, devices=None)
    with configured({MODE: "legacy", "missing-gpu": "warn", NO_CGROUPS: True}):
        results["not granted, warn"] = bench.case(plain=True)
        results["no such GPU, warn"] = bench.case(plain=True, devices="63")
        results["requirement, warn"] = bench.case(plain=True, more=(REQUIREMENT,))
    with configured({MODE: "legacy", DEBUG: str(LOG)}):
        results["no such GPU"] = bench.case(plain=True, devices="63")
        results["log"] = LOG.read_text()
    bench.prestart = []
    return results


def states(bench: Bench, granted: Path) -> dict[str, Any]:
    """Call the hook with invalid container states; *granted* is a bundle of our runtime."""
    own = ["unshare", "--mount", "--propagation=private", "sleep", "60"]
    ended = subprocess.Popen(["true"])
    ended.wait()
    with subprocess.Popen(["sleep", "60"]) as on_host, subprocess.Popen(own) as elsewhere:
        other = f"other-{bench.count}"
        change(bench.last, lambda config: config["process"].update(args=["/bin/busybox"]))
        create(bench, other)
        container = json.loads(run(bench.lowlevel, "state", other).stdout)["pid"]
        pids: dict[str, object] = {
            "ended": ended.pid,
            "of the host": on_host.pid,
            "init": 1,
            "in another namespace": elsewhere.pid,
            "of another container": container,
        }
        pids.update((json.dumps(pid), pid) for pid in (0, -1, 1.0, "1", True, None, 1 << 22, [1]))
        results = {}
        for name, pid in pids.items():
            results[name] = call(json.dumps({"bundle": str(granted), "pid": pid}))
            results[name]["mounts there"] = [
                line.split()[4]
                for process in (elsewhere.pid, container)
                for line in Path(f"/proc/{process}/mountinfo").read_text().splitlines()
                if "libcuda" in line
            ]
        run(bench.lowlevel, "delete", "--force", other)
        on_host.kill()
        elsewhere.kill()
    return results


def create(bench: Bench, name: str) -> None:
    """Create a container of the last bundle, without our pipes; do not start it."""
    subprocess.run(
        [bench.lowlevel, "create", "--bundle", str(bench.last), name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
        timeout=30,
    )


def call(state: str, *words: str) -> dict[str, Any]:
    """Return the result of the hook for *state*."""
    before = mounted()
    done = subprocess.run(
        [str(HOOK), *words, "prestart"],
        input=state,
        text=True,
        capture_output=True,
        check=False,
        timeout=30,
    )
    return answer(done, before)


def play_shared() -> dict[str, Any]:
    """Run the cases of `shared`, with runc."""
    CONFIG.parent.mkdir(exist_ok=True)
    bench = Bench("runc")
    bench.case(plain=True)
    results: dict[str, Any] = {}
    with nothing_left(results), configured({MODE: "legacy"}):
        results["shared"] = shared(bench)
    return results


def play(lowlevel: str) -> dict[str, Any]:
    """Run every other case with *lowlevel*."""
    if lowlevel == "crun":
        without_unified()
    CONFIG.parent.mkdir(exist_ok=True)
    ENGINES.symlink_to(HOOK)
    bench = Bench(lowlevel)
    legacy: dict[str, object] = {
        MODE: "legacy",
        "nvidia-container-runtime.runtimes": [lowlevel],
    }
    results: dict[str, Any] = {"plain": bench.run("1,3", plain=True)}
    with nothing_left(results):
        with configured(legacy):
            results["usual"] = bench.case()
        granted = bench.last
        results["again"] = bench.again()
        results["skip"] = bench.again(**{MODE: "cdi", SKIP: True})
        results["mode"] = bench.again(**{MODE: "cdi"})
        with configured(legacy):
            results["none"] = bench.case(devices="none")
            results["unasked"] = bench.case(devices=None)
            results["all"] = bench.case(more=(f"{CAPABILITIES}=all",))
            results["requirement"] = bench.case(more=(REQUIREMENT,))
            bench.prestart = [{"path": str(ENGINES), "args": [ENGINES.name, "prestart"]}] * 2
            results["twice"] = bench.case()
            bench.prestart = []
            results["roots"] = roots(bench)
        with configured({**legacy, DEBUG: str(LOG)}):
            results["audited"] = bench.case(audited)
            results["loaded"] = LOADED.read_text().splitlines()
            results["log"] = {"text": LOG.read_text(), "mode": LOG.stat().st_mode & 0o777}
        LOG.unlink()
        LOG.symlink_to(WORK / "elsewhere")
        with configured({**legacy, DEBUG: str(LOG)}):
            results["log is a link"] = bench.case()
            results["elsewhere"] = (WORK / "elsewhere").exists()
        LOG.unlink()
        results["compat"] = compat(bench, legacy)
        results["alone"] = hook_alone(bench)
        bench.case(plain=True, devices=None)
        results["states"] = states(bench, granted)
    return results


if __name__ == "__main__":
    main(
        {
            "shared": play_shared,
            "mig": play_mig,
            **{name: partial(play, name) for name in ("runc", "crun")},
        }
    )
