# SPDX-License-Identifier: Apache-2.0
"""Programs without a container: a program that does nothing, and our runtime in front of it.

For the simulated host whose config.toml has LOWLEVEL as its low-level runtime. The cost of a
create is that of our runtime alone, without hooks and without the work of runc for our edits. The
peak memory is ours too: runc takes more than our runtime.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from bench.cases import BARE, LOWLEVEL, OURS, Case
from bench.counts import counted
from bench.lives import PREFIX, PROGRAM, WORK, Place, Sample

FLOOR = ("/usr/bin/python3", "-I", "-S", "-B", "-X", "utf8", "-c", "pass")
# The file that names the Python of the launcher: gpuruntime/launcher/README.md.
INTERPRETER = PREFIX / "lib" / "gpuruntime" / "launcher.interpreter"
NO_PYTHON = f"gpuruntime-interpreter 1\nlibrary {PREFIX}\npython /nonexistent\nend\n"
CREATES = {
    "create, no GPU": Case(BARE, "", OURS),
    "create, 8 GPUs": Case(BARE, "", OURS, "all"),
    "create, 8 GPUs, all capabilities": Case(BARE, "", OURS, "all", "all"),
}


class Programs:
    """The programs, and a bundle for the creates."""

    def __init__(self, place: Place, hello: Path) -> None:
        self.place = place
        self.hello = hello
        self.lowlevel = Path(LOWLEVEL)
        self.bundle = WORK / "bare"
        self.bundle.mkdir()
        shutil.copy(hello, self.lowlevel)

    def time(self) -> dict[str, Sample]:
        """Return the cost of each program; creates are measured warm, after an untimed create."""
        spawner = self.place.spawner
        samples = {
            "true": spawner.time(["/bin/true"]),
            "hello": spawner.time([self.hello]),
            "python": spawner.time(FLOOR),
            "state": spawner.time([PROGRAM, "state", "one"]),
        }
        for name, command in self._creates():
            spawner.time(command)
            self._restore(name)
            samples[name] = spawner.time(command)
        return samples

    def count(self) -> dict[str, int]:
        """Return the instructions of each program, up to the failing exec of LOWLEVEL.

        For a create that the launcher does not complete alone, return those of Python.
        """
        log = WORK / "callgrind.log"
        counts = {"floor": counted(log, FLOOR)}
        self.lowlevel.write_text("not a program\n")
        try:
            for name, command in self._creates():
                subprocess.run(command, capture_output=True, check=False)
                self._restore(name)
                with_python = counted(log, command)
                counts[f"bytes, {name}"] = self._restore(name)
                # Without Python the launcher fails where it needs Python: its own part is counted.
                INTERPRETER.write_text(NO_PYTHON)
                own = counted(log, command)
                is_done = CREATES[name].gpus is None or self._is_changed(name)
                counts[name] = own if is_done else with_python
                counts["state"] = counted(log, [PROGRAM, "state", "one"])
                INTERPRETER.unlink()
        finally:
            INTERPRETER.unlink(missing_ok=True)
            shutil.copy(self.hello, self.lowlevel)
        return counts

    def _is_changed(self, name: str) -> bool:
        return (self.bundle / "config.json").read_text() != self.place.document(CREATES[name])

    def _creates(self) -> Iterator[tuple[str, list[str]]]:
        for name in CREATES:
            self._restore(name)
            yield name, [str(PROGRAM), "create", "--bundle", str(self.bundle), "one"]

    def _restore(self, name: str) -> int:
        """Write the config.json of the engine again; return its length."""
        document = self.place.document(CREATES[name])
        return (self.bundle / "config.json").write_text(document)
