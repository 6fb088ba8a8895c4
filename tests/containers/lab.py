# SPDX-License-Identifier: Apache-2.0
"""`lab.py NAME [FORM]`: make an engine read the CDI spec that we write for the lab (labspec.py).

For the simulated host, as scenario.py.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import image
import labspec
from drivers import Podman
from scenario import WORK, main, nothing_left, without_unified

from cdi import generate, inject, registry, store, yamlio
from cdi.errors import CdiError
from gpuruntime.trusted_files import may_trust

STATIC, DYNAMIC = registry.DEFAULT_DIRECTORIES
LAB = labspec.Lab(WORK)


class Recorded(Podman):
    """podman, with a low-level runtime that saves each config.json and then executes crun."""

    def __init__(self, work: Path) -> None:
        super().__init__(work, proc_driver=False)
        self.configs = work / "configs"
        self.configs.mkdir()
        self.runtime = work / "crun"
        # The file of the engine: crun keeps its own changes to the config in memory.
        self.runtime.write_text(
            "#!/bin/sh\n"
            "bundle= last=\n"
            'for word; do [ "$last" = --bundle ] && bundle=$word; last=$word; done\n'
            f"cd {shlex.quote(str(self.configs))} || exit\n"
            '[ -z "$bundle" ] || cp "$bundle/config.json" "$last"\n'
            'exec crun "$@"\n'
        )
        self.runtime.chmod(0o755)

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Load the image, and run a first container: podman creates its own files then."""
        with super().started():
            self.attempt([], script="true")
            yield

    def attempt(self, names: list[str], *words: str, script: str) -> dict[str, Any]:
        """Run *script* in a container with the devices *names*; return the result."""
        options = self.words(None)
        options += [word for name in names for word in ("--device", name)]
        done = self.client(
            *("--runtime", self.runtime, "run", "--rm", *options, *words),
            *(image.NAME, "/bin/busybox", "sh", "-c", script),
            check=False,
        )
        self.settle()
        result = {"status": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
        for file in self.configs.iterdir():
            # The paths contain the id of the container, which differs.
            result["config"] = json.loads(file.read_text().replace(file.name, "ID"))
            file.unlink()
        return result


def load() -> registry.Registry:
    """Return the registry of our library for the directories that podman reads."""
    return registry.load(
        registry.DEFAULT_DIRECTORIES, may_trust=may_trust, decode_yaml=yamlio.decode_all
    )


def save(name: str, document: Any, directory: str = STATIC) -> str:
    """Write a spec with our store; return its path."""
    return store.save_spec(document, name, [directory], may_trust=may_trust)


# Options of `podman run` that collide with the edits of the devices.
USERS = {
    "root": [],
    "user": ["--user", "1234:1235"],
    "own": [
        *("--env", "LAB_COMMON=user", "--env", "LAB_OWN=kept", "--workdir", "/tmp"),
        *("--volume", f"{WORK}/lab/other:/lab/single", "--volume", f"{WORK}/lab:/lab:ro"),
        *("--tmpfs", "/lab/hooks", "--device", "/dev/lab0:/dev/lab0:r"),
    ],
}


def values(form: str) -> dict[str, Any]:
    """Run containers with all devices of the lab, from a spec in the format *form*."""
    LAB.prepare()
    save(f"lab.{form}", generate.spec(labspec.KIND, LAB.devices(), LAB.common()))
    without_unified()
    engine = Recorded(WORK)
    results: dict[str, Any] = {"work": str(WORK)}
    with engine.started():
        with nothing_left(results):
            seen = engine.attempt(labspec.names(), script=labspec.script())
            results["seen"] = {**seen, "hooks": LAB.hooks_seen()}
        results["users"] = {name: compare(engine, words) for name, words in USERS.items()}
    return results


def compare(engine: Recorded, words: list[str]) -> dict[str, Any]:
    """Return the config of podman without and with the devices, and the first with our edits."""
    without = engine.attempt([], *words, script="true")
    its = engine.attempt(labspec.names(), *words, script="true")
    # Remove the output files: a hook of another user cannot overwrite those of root.
    LAB.hooks_seen()
    devices = partial(inject.inject, load(), labspec.names())
    return {
        "without": without,
        "its": its,
        "ours": devices(without["config"]),
        "appended": devices({})["process"]["env"],
    }


def folders() -> dict[str, Any]:
    """Request devices that are defined twice, or that share a directory with a broken file."""
    without_unified()

    def spec(**devices: str) -> Any:
        entries = [(name, {"env": [f"LAB={text}"]}) for name, text in devices.items()]
        return generate.spec(labspec.KIND, entries, {})

    save("low.yaml", spec(both="/etc/cdi", low="low", twice="low file"))
    save("same.json", spec(twice="same file", same="same"))
    save("high.json", spec(both="/var/run/cdi", high="high"), DYNAMIC)
    save("clean.json", spec(twice="once here"), DYNAMIC)
    Path(STATIC, "broken.yaml").write_text(f'cdiVersion: "0.5.0"\nkind: {labspec.KIND}\nx: 1\n')
    # In the directory of higher priority: the lower definition stays in force.
    Path(DYNAMIC, "broken.json").write_text(
        json.dumps(spec(low="broken")).replace("0.3.0", "0.9.0")
    )
    engine = Recorded(WORK)
    results: dict[str, Any] = {"podman": {}, "library": {}}
    with engine.started(), nothing_left(results):
        for name in ("both", "low", "same", "high", "twice", "none", "low:rwm"):
            qualified = f"{labspec.KIND}={name}"
            done = engine.attempt([qualified], script='echo "$LAB"')
            results["podman"][name] = [done["status"], done["stdout"].strip(), done["stderr"]]
            try:
                results["library"][name] = load().resolve([qualified])["env"][-1]
            except CdiError as error:
                results["library"][name] = error.category
    results["errors"] = sorted(load().errors)
    return results


if __name__ == "__main__":
    main(
        {f"values-{form}": partial(values, form=form) for form in ("json", "yaml")}
        | {"folders": folders}
    )
