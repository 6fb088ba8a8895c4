# SPDX-License-Identifier: Apache-2.0
"""Start containers of images with a hostile environment; print what environment the hook had.

Standard output is one JSON object: attack → variant → what was seen. A recorder stands in the
interpreter's place. Variants: `absent`, without the hook's own environment; `set`, with the one
that its spec gives, which runc hands on in place of the image's, for attacks by many variables at
once; `control`, the recorder without the launcher; `weak`, a Python hook that the variable can
turn against its user, for the variables that can.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import hostile
import scenario

SET = ("env_04_python_together", "env_05_character_set", "env_06_everything_else")
# Variable → the flags of an interpreter that is still beaten by it.
WEAK_FLAGS = {
    "pythonhome": (),
    "pythonuserbase": (),
    "home": ("-E",),
    "pythonplatlibdir": (),
}


def record_all(top: Path, pristine: Path, spec: str) -> dict[str, dict[str, object]]:
    """Run every ENV attack in every variant."""
    built = top / "built" / "work"
    built.mkdir(parents=True)
    builder = hostile.Attack(built, pristine)
    hostile.fd_01_what_the_hook_has(builder)
    launcher = builder.hook()["path"]
    ours = json.loads(spec)["containerEdits"]["hooks"][0]
    hooks = {
        "set": (launcher, ours["args"], ours["env"]),
        "absent": (launcher, ours["args"], None),
        "control": (str(builder.recorder), ["gpu-cdi-hook"], None),
    }
    results: dict[str, dict[str, object]] = {}
    for prepare, _ in hostile.ATTACKS:
        name = prepare.__name__
        if not name.startswith("env"):
            continue
        seen = results[name] = {}
        for variant in (*hooks, "weak"):
            flags = WEAK_FLAGS.get(name.removeprefix("env_04_"))
            if (variant == "weak" and flags is None) or (variant == "set" and name not in SET):
                continue
            hostile.SPEC.write_text(spec)
            work = top / f"{name}-{variant}" / "work"
            work.mkdir(parents=True)
            attack = hostile.Attack(work, pristine)
            attack.recorder = builder.recorder
            Path(f"{builder.recorder}.record").unlink(missing_ok=True)
            prepare(attack)
            if variant == "weak":
                hostile.python_hook(attack, *(flags or ()))
            else:
                attack.use_hook(*hooks[variant])
            seen[variant] = {**hostile.observe(attack), "environment": attack.environment}
    return results


def main() -> None:
    """Run every attack in every variant and print what was seen."""
    top = Path(tempfile.mkdtemp(prefix="gpuruntime-environ-"))
    try:
        scenario.generate()
        spec = hostile.SPEC.read_text()
        pristine = scenario.make_bundle(top / "pristine", "0")
        json.dump(record_all(top, pristine, spec), sys.stdout)
    finally:
        shutil.rmtree(top, ignore_errors=True)


if __name__ == "__main__":
    main()
