# SPDX-License-Identifier: Apache-2.0
"""What is done in a read-only root before the low-level runtime is called."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from gpuruntime.plan import early_commands
from gpuruntime.shim import early_hook

LINKS = ("--link", "a.so.2::/usr/lib/a.so", "--link", "b.so.2::/opt/lib/b.so")
LIBRARY = ("--library", "a.so.2::/usr/lib/a.so.2::x86-64")
REST = ("--mask-params", "--chmod", "755::/dev/dri")
ARGUMENTS = ("gpu-cdi-hook", "--deadline=20", "update-container", *LINKS, *LIBRARY, *REST)
HEAD = ["gpu-cdi-hook", "--deadline=20", "update-container", "--ahead"]
ENGINE = ("/proc", "/dev", "/dev/shm", "/sys", "/etc/hosts", "/etc/resolv.conf")


def hook(*arguments: str, name: str = "createContainer") -> dict[str, Any]:
    """Return edits with one hook."""
    given = {"hookName": name, "path": "/usr/bin/gpu-cdi-hook", "args": list(arguments)}
    return {"hooks": [given]}


def document(*, readonly: object = True, **linux: Any) -> dict[str, Any]:
    """Return a config."""
    return {"root": {"path": "rootfs", "readonly": readonly}, "linux": linux}


def commands(
    edits: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    places: tuple[object, ...] = ENGINE,
    runtime: str = "/usr/bin/crun",
) -> list[list[str]]:
    """Return the commands for the hook of our specs, if there is no other."""
    edits = hook(*ARGUMENTS) if edits is None else edits
    asking = {**(config or document()), "mounts": [{"destination": place} for place in places]}
    found = early_commands.commands(edits, asking, runtime)  # type: ignore[arg-type]
    assert {command.path for command in found} <= {"/usr/bin/gpu-cdi-hook"}
    return [command.arguments for command in found]


def test_our_hook_runs_ahead() -> None:
    """With all its arguments: what cannot be done yet, it leaves by itself."""
    assert commands() == [[*HEAD, *LINKS, *LIBRARY, *REST]]


@pytest.mark.parametrize("readonly", [False, None, "true", 1])
def test_a_root_that_is_not_read_only_waits_for_the_hook(readonly: object) -> None:
    """As runc and crun have it, which fail for what is neither."""
    assert commands(config=document(readonly=readonly)) == []


def test_users_that_are_mapped_wait_for_the_hook() -> None:
    """It knows whose files they are."""
    assert commands(config=document(namespaces=[{"type": "user"}])) == []


def test_the_runtime_decides(tmp_path: Path) -> None:
    """By its own name, whatever link leads to it."""
    for name in ("runc", "runc-1.2", "crun", "youki"):
        (tmp_path / name).touch()
        (tmp_path / f"link-{name}").symlink_to(name)
        for place in (name, f"link-{name}"):
            found = commands(runtime=str(tmp_path / place))
            assert bool(found) is not name.startswith("runc")


@pytest.mark.parametrize(
    "edits",
    [
        {},
        hook(*ARGUMENTS, name="createRuntime"),
        hook("gpu-cdi-hook", "update-ldcache", "--folder", "/usr/lib"),
        hook("update-container"),
        {"hooks": [{**hook(*ARGUMENTS)["hooks"][0], "path": "rootfs/bin/gpu-cdi-hook"}]},
        hook(),
    ],
)
def test_other_hooks_wait(edits: dict[str, Any]) -> None:
    """They would not know what they must not do yet."""
    assert commands(edits) == []


@pytest.mark.parametrize("place", ["/etc", "/etc/", "//etc", "etc", "/etc/ld.so.cache", "/"])
def test_a_mount_over_the_loaders_files(place: str) -> None:
    """They would be written where nobody sees them."""
    (found,) = commands(places=(*ENGINE, place))
    assert found[-2:] == ["--ldconfig-mode", "none"]
    assert ("--link" in found) is (place != "/")


def test_a_mount_over_a_link() -> None:
    """Only the other is made."""
    (found,) = commands(places=("/usr", None))
    assert found == [*HEAD, *LINKS[2:], *LIBRARY, *REST]
    edits = hook("gpu-cdi-hook", "update-container", "--link=a::/usr/lib/a.so", *LINKS[2:])
    (found,) = commands(edits, places=("/usr",))
    assert found == ["gpu-cdi-hook", "update-container", "--ahead", *LINKS[2:]]
    (found,) = commands(places=("/opt/lib/b.so",))
    assert found == [*HEAD, *LINKS[:2], *LIBRARY, *REST]


@pytest.mark.slow
def test_it_has_the_time_of_a_hook(tmp_path: Path) -> None:
    """One without end is ended, and the container comes to its hook."""
    edits = hook(*ARGUMENTS)
    for timeout in (None, 7):
        edits["hooks"][0].update({"timeout": timeout} if timeout else {})
        (command,) = early_commands.commands(edits, document(), "/usr/bin/crun")  # type: ignore[arg-type]
        assert command.timeout_s == (timeout or 30)
    program = tmp_path / "hook"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    program.chmod(0o755)
    start = time.monotonic()
    early_hook.run([early_commands.EarlyCommand(str(program), ["hook"], 1)], str(tmp_path))
    assert 1 <= time.monotonic() - start < 30
    assert not Path("/proc", (tmp_path / "pid").read_text().strip(), "exe").exists()


def test_it_is_run_with_a_state_and_without_an_environment(tmp_path: Path) -> None:
    """As the low-level runtime does; what comes of it is not asked."""
    program = tmp_path / "hook"
    program.write_text(f'#!/bin/sh\ncat > {tmp_path}/state\nenv > {tmp_path}/env\nexit "$1"\n')
    program.chmod(0o755)
    (tmp_path / "link").symlink_to(tmp_path)
    for status in ("0", "7"):
        command = early_commands.EarlyCommand(str(program), ["hook", status], 30)
        early_hook.run([command], str(tmp_path / "link"))
        state = json.loads((tmp_path / "state").read_text())
        assert state["bundle"] == str(tmp_path)
        assert "HOME" not in (tmp_path / "env").read_text()
        (tmp_path / "state").unlink()
    # It reads nothing of the state, or is no program.
    for path in ("/bin/true", str(tmp_path / "missing"), "/dev/null"):
        early_hook.run([early_commands.EarlyCommand(path, [path], 30)], str(tmp_path))
    early_hook.run([command], str(tmp_path / ("x/" * 2200)))
    assert not (tmp_path / "state").exists()
