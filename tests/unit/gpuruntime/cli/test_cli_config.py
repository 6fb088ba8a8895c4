# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime config`, as a program: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import forked_cli
import pytest

from gpuruntime import config
from gpuruntime.configfile import edit, option_table

# Each test starts the command line, most of them several times.
pytestmark = pytest.mark.slow

TREE = Path(__file__).parents[4]
MODE = "nvidia-container-runtime.mode"
# As the incumbent's package has it.
INCUMBENT = """\
#accept-nvidia-visible-devices-as-volume-mounts = false
#accept-nvidia-visible-devices-envvar-when-unprivileged = true
disable-require = false
supported-driver-capabilities = "compat32,compute,display,graphics,ngx,utility,video"
#swarm-resource = "DOCKER_RESOURCE_GPU"

[nvidia-container-cli]
#debug = "/var/log/nvidia-container-toolkit.log"
environment = []
#ldcache = "/etc/ld.so.cache"
ldconfig = "@/sbin/ldconfig"
load-kmods = true
#no-cgroups = false
#path = "/usr/bin/nvidia-container-cli"
#root = "/run/nvidia/driver"
#user = "root:video"

[nvidia-container-runtime]
#debug = "/var/log/nvidia-container-runtime.log"
log-level = "info"
mode = "auto"
runtimes = ["runc", "crun"]

[nvidia-container-runtime.modes]

[nvidia-container-runtime.modes.cdi]
annotation-prefixes = ["cdi.k8s.io/"]
default-kind = "nvidia.com/gpu"
spec-dirs = ["/etc/cdi", "/var/run/cdi"]

[nvidia-container-runtime.modes.csv]
mount-spec-path = "/etc/nvidia-container-runtime/host-files-for-container.d"

[nvidia-container-runtime.modes.legacy]
cuda-compat-mode = "ldconfig"

[nvidia-container-runtime-hook]
path = "nvidia-container-runtime-hook"
skip-mode-detection = false

[nvidia-ctk]
path = "nvidia-ctk"
"""
WRONG = """\
disable-require = 1
xx = 1
[nvidia-container-runtime]
missing-gpu = "warn"
log-level = "loud"
mode = "tegra"
[nvidia-container-cli]
ldconfig = "/sbin/ldconfig"
no-pivot = true
load-kmods = { a = 1 }
"""


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `gpuruntime config` with *arguments*."""
    variables = {"PATH": "/usr/bin:/bin", "XDG_CONFIG_HOME": "/nonexistent", **environment}
    return forked_cli.run("config", *arguments, env=variables)


def said(done: subprocess.CompletedProcess[str], status: int = 1) -> str:
    """Return the error of a command that fails with *status*: two lines, nothing on stdout."""
    assert done.returncode == status, done
    assert done.stdout == ""
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: configuration: ")
    assert hint.startswith("hint: ")
    return error


@pytest.fixture
def incumbent(tmp_path: Path) -> Path:
    """Return a file as the incumbent's package has it."""
    path = tmp_path / "config.toml"
    path.write_text(INCUMBENT)
    return path


def test_the_incumbent_s_file_is_right_as_it_is(incumbent: Path) -> None:
    """Nobody who changes over edits a file first."""
    done = run("check", "-c", incumbent)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "0 problems\n")


@pytest.mark.parametrize("command", ["default", "create-default", "generate-default"])
def test_the_default_file_is_right(tmp_path: Path, command: str) -> None:
    """And it is the example, but for what depends on the host."""
    path = tmp_path / "a" / "b" / "config.toml"
    done = run(command, "--output", path)
    assert (done.returncode, done.stderr) == (0, f'wrote "{path}"\n')
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755
    assert run("check", "-c", path).stderr == "0 problems\n"
    assert run(command).stdout == path.read_text()
    differ = set(path.read_text().splitlines()) ^ set(option_table.example().splitlines())
    assert all("ldconfig" in line or "root:video" in line for line in differ)


def test_a_check_names_everything_with_its_line(tmp_path: Path) -> None:
    """One run, one round of corrections."""
    path = tmp_path / "config.toml"
    path.write_text(WRONG)
    done = run("check", "--config", path)
    assert done.returncode == 1
    assert done.stderr == "7 problems\n"
    lines = [line.removeprefix(f"{path}:").split(": ", 2) for line in done.stdout.splitlines()]
    assert [(where, word) for where, word, _ in lines] == [
        ("1", "error"),
        ("2", "warning"),
        ("4", "warning"),
        ("5", "warning"),
        ("6", "error"),
        ("8", "error"),
        ("9", "note"),
        ("10", "error"),
    ]
    assert lines[2][2].endswith('the nearest known key is "missing-gpu"')
    assert "invalid config value" in lines[5][2]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('log-level = "DEBUG"', ""),
        ('runtimes = ["runc", ""]', '"nvidia-container-runtime.runtimes" has an empty string'),
        ("runtimes = [1]", '"nvidia-container-runtime.runtimes" is not a list of strings'),
    ],
)
def test_what_a_check_says(tmp_path: Path, line: str, said: str) -> None:
    """In the words of what is there; the incumbent takes levels in any letter case."""
    path = tmp_path / "config.toml"
    path.write_text(f"[nvidia-container-runtime]\n{line}\n")
    done = run("check", "-c", path)
    assert said in done.stdout
    assert (done.returncode, bool(done.stdout)) == (bool(said), bool(said))


def test_a_key_that_is_never_acted_on_is_a_note_with_the_reason(tmp_path: Path) -> None:
    """The incumbent's file may have it, and the operator should know why it does nothing."""
    path = tmp_path / "config.toml"
    path.write_text('[nvidia-container-cli]\nno-pivot = true\ndebug = ""\n')
    done = run("check", "-c", path)
    assert (done.returncode, done.stderr) == (0, "0 problems\n")
    option = option_table.BY_KEY["nvidia-container-cli.no-pivot"]
    assert done.stdout == f'{path}:2: note: "{option.key}" has no effect: {option.never}\n'
    assert len(option.never.split()) > 5
    # `config set` says the same, and sets it.
    done = run("set", "-i", "-c", path, "nvidia-container-cli.no-pivot=1")
    assert done.returncode == 0
    assert f'note: "{option.key}" has no effect: {option.never}\n' in done.stderr


def test_a_check_without_a_file() -> None:
    """None in force is fine, none where one is named is not."""
    none = run("check", GPURUNTIME_CONFIG="/nonexistent")
    # A machine may have one of its own.
    assert ("defaults are in force" in none.stderr) is (config.find({}) is None)
    assert "does not exist" in said(run("check", "-c", "/nonexistent/config.toml"))


def test_show_prints_values_and_where_they_are_from(incumbent: Path) -> None:
    """As TOML, so that it can be used again, or as JSON."""
    done = run("show", GPURUNTIME_CONFIG=str(incumbent))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == f"# {incumbent}"
    assert f'{MODE} = "auto"  # file\n' in done.stdout
    assert 'missing-gpu = "error"  # default\n' in done.stdout
    shown = {
        option_table.to_key(k): v for k, v in option_table.flatten(tomllib.loads(done.stdout))
    }
    assert shown == {k: v for k, v in config.DEFAULTS.items() if v is not None}
    found = json.loads(run("show", "--json", "-c", incumbent).stdout)
    assert found["file"] == str(incumbent)
    assert found["values"][MODE] == {"value": "auto", "from": "file"}
    assert found["values"].keys() == config.DEFAULTS.keys()
    # What no program acts on has the reason.
    option = option_table.BY_KEY["nvidia-container-cli.path"]
    assert f'{option.key} = ""  # default; no effect: {option.never}\n' in done.stdout
    assert found["values"][option.key]["no_effect"] == option.never
    assert json.loads(run("show", "--json", "-c", "/nonexistent").stdout)["file"] is None


def test_show_says_what_has_no_effect(incumbent: Path) -> None:
    """Who looks for a value that does nothing finds it misspelt."""
    incumbent.write_text("discovery-timout = 5\n")
    done = run("show", "-c", incumbent)
    assert "discovery-timeout = 30  # default\n" in done.stdout
    assert done.stderr == (
        f'warning: "{incumbent}" line 1: the key "discovery-timout" has no effect; '
        'the nearest known key is "discovery-timeout"\n'
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("--config-file={}", "--set", f"{MODE}=cdi", "--set", "disable-require"),
        ("set", "--config={}", "--set", f"{MODE}=cdi", "disable-require"),
        ("-c", "{}", "set", f"{MODE}=cdi", "disable-require=1"),
    ],
)
def test_options_are_set(incumbent: Path, arguments: tuple[str, ...]) -> None:
    """The incumbent's spelling, and ours; the file itself stays without --in-place."""
    done = run(*(argument.format(incumbent) for argument in arguments))
    expected = INCUMBENT.replace('mode = "auto"', 'mode = "cdi"').replace(
        "disable-require = false", "disable-require = true"
    )
    assert (done.returncode, done.stdout) == (0, expected)
    assert incumbent.read_text() == INCUMBENT


def test_a_file_is_changed_in_place(incumbent: Path) -> None:
    """Mode, owner, a link to it, comments and unknown keys stay; equal content is not written."""
    incumbent.write_text(f"{INCUMBENT}# end\nown = 1\n")
    incumbent.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(incumbent, 12345, 54321)
    before = incumbent.stat()
    link = incumbent.with_name("link")
    link.symlink_to("config.toml")
    done = run("set", "-i", "-c", link, f"{MODE}=cdi")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f'wrote "{link}"\n')
    after = incumbent.stat()
    assert incumbent.read_text() == INCUMBENT.replace('"auto"', '"cdi"') + "# end\nown = 1\n"
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode,
        before.st_uid,
        before.st_gid,
    )
    assert link.is_symlink()
    assert run("set", "-i", "-c", link, f"{MODE}=cdi").stderr == f'unchanged "{link}"\n'
    assert incumbent.stat().st_ino == after.st_ino
    assert sorted(os.listdir(incumbent.parent)) == ["config.toml", "link"]


def test_a_file_that_is_not_there_begins_with_the_defaults(tmp_path: Path) -> None:
    """Packages make theirs so."""
    path = tmp_path / "etc" / "config.toml"
    assert run("--in-place", GPURUNTIME_CONFIG=str(path)).returncode == 0
    assert path.read_text() == run("default").stdout
    other = tmp_path / "other.toml"
    done = run("-c", path, "-o", other, "--set", "nvidia-container-cli.root=/run/nvidia/driver")
    assert done.returncode == 0
    sample = '\n#root = "/run/nvidia/driver"\n'
    assert other.read_text() == path.read_text().replace(sample, sample.replace("#", ""))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("no-such=1", "invalid config option"),
        ("disable-require=maybe", "invalid value"),
        ("hook-deadline=x", "give a whole number from 1 to 600"),
        ("nvidia-container-runtime.runtimes=", "empty string"),
    ],
)
def test_what_cannot_be_set_changes_nothing(incumbent: Path, argument: str, message: str) -> None:
    """Also not by what is before it on the same command line."""
    done = run("set", "-i", "-c", incumbent, f"{MODE}=cdi", argument)
    assert said(done, 2)
    assert message in done.stderr
    assert incumbent.read_text() == INCUMBENT
    assert os.listdir(incumbent.parent) == ["config.toml"]


CAPABILITIES = '"compat32", "compute", "display", "graphics", "ngx", "utility", "video", "all"'
MODES = '"auto", "cdi", "csv", "jit-cdi", "legacy"'
# A value that a start of a container refuses or replaces → the severity in the file, and what the
# message and the hint say: the allowed values among it.
REFUSED = {
    f"{MODE}=tegra": ("error", f'{MODE}" is "tegra"', MODES),
    f"{MODE}=none-such": ("error", f'{MODE}" is "none-such"', MODES),
    "hook-deadline=9999": ("warning", '"hook-deadline" is 9999: 600 is used', "1 to 600"),
    "discovery-timeout=0": ("error", "whole number above 0", "whole number above 0"),
    "health=dcgm": ("error", '"health" is "dcgm"', '"", "nvml"'),
    "ldconfig-mode=none-such": ("error", "ldconfig-mode", '"merge", "host", "none"'),
    "missing-gpu=hide": ("error", "missing-gpu", '"error", "warn"'),
    "supported-driver-capabilities=compute,x": ("error", 'has "x"', CAPABILITIES),
    "nvidia-container-cli.root=srv": ("error", "not an absolute path", "/"),
    "nvidia-container-cli.debug=x.log": ("warning", "not an absolute path", "/"),
    "nvidia-container-runtime.debug=x.log": ("warning", "not an absolute path", "/"),
    "nvidia-container-runtime.log-level=loud": ("warning", 'taken for "info"', '"panic", "fatal"'),
    "nvidia-container-runtime.runtimes=bin/runc": ("warning", "bin/runc", "absolute path"),
    "nvidia-container-runtime.modes.cdi.default-kind=gpu": ("error", "vendor", "vendor/class"),
    "nvidia-container-runtime.modes.cdi.spec-dirs=cdi": ("error", "not an absolute path", "/"),
    "nvidia-container-runtime.modes.jit-cdi.driver-capabilities=x": ("error", "", '"env", "all"'),
    "nvidia-container-runtime.modes.legacy.cuda-compat-mode=x": ("warning", "", '"mount"'),
    "nvidia-container-cli.ldconfig=/sbin/ldconfig": ("error", "invalid config value", "@/sbin"),
    "nvidia-container-cli.ldconfig=@ldconfig": ("error", "absolute path", "@/sbin/ldconfig"),
}


@pytest.mark.parametrize("argument", REFUSED)
def test_what_a_container_would_not_get_is_refused_when_it_is_set(
    incumbent: Path, argument: str
) -> None:
    """With the allowed values; a check of a file that has the value says the same."""
    severity, message, allowed = REFUSED[argument]
    done = run("set", "-i", "-c", incumbent, argument)
    error = said(done, 2).removeprefix("error: configuration: ")
    hint = done.stderr.splitlines()[1].removeprefix("hint: ")
    assert message in error
    assert allowed in hint
    assert incumbent.read_text() == INCUMBENT
    # The control: an editor can write it.
    option, value = edit.parse(argument)
    changed = edit.apply(INCUMBENT, option, value)
    incumbent.write_text(changed)
    done = run("check", "-c", incumbent)
    assert done.returncode == 1
    setting = f"{option.name} = {option_table.literal(value)}"
    line = changed.splitlines().index(setting) + 1
    assert done.stdout == f"{incumbent}:{line}: {severity}: {error}; {hint}\n"


def test_a_value_that_was_wrong_can_be_corrected(tmp_path: Path) -> None:
    """And the others that are wrong do not stand in the way."""
    path = tmp_path / "config.toml"
    path.write_text(WRONG)
    assert run("set", "-i", "-c", path, "disable-require=true").returncode == 0
    assert path.read_text() == WRONG.replace("disable-require = 1", "disable-require = true")


@pytest.mark.parametrize(
    "arguments",
    [("set",), ("-i", "-o", "x"), ("--set", "a=b", "show"), ("set", "-i", "-o", "x", "a=b")],
)
def test_a_wrong_command_line_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    """Nothing is guessed."""
    done = run("-c", "/nonexistent/x", *arguments)
    assert (done.returncode, done.stdout) == (2, "")


BAD: dict[str, bytes] = {
    "no TOML": b"x = [",
    "no UTF-8": b'# \xff\nx = "',
    "a NUL": b"x = \0",
    "twice": b"disable-require = true\ndisable-require = true\n",
    "huge": b"#" * (1 << 20),
    "deep lists": b"x = " + b"[" * 50_000,
    "deep tables": b"x = " + b"{x = " * 5_000,
    "deep key": b"a." * 60_000 + b"a = 1",
    "deep header": b"[" + b"a." * 30_000 + b"a]\n" + b"".join(b"k%d=1\n" % n for n in range(9999)),
    "digits": b"discovery-timeout = " + b"9" * 5_000,
    "a table for a value": b"x = 1\n[nvidia-container-cli.root]\ny = 1\n",
    "a value for a table": b"nvidia-container-runtime = 1\n",
    "tables for a table": b"[[nvidia-container-runtime]]\nmode = 'cdi'\n",
}
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("show",),
    ("compile",),
    ("check",),
    ("set", "-i", f"{MODE}=cdi"),
    (),
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_error(tmp_path: Path, name: str, command: tuple[str, ...]) -> None:
    """No traceback, no hang, and nothing is written."""
    path = tmp_path / "config.toml"
    path.write_bytes(BAD[name])
    done = run("-c", path, *command)
    if name.startswith(("a table", "a value", "tables")):
        if command == ("check",):
            assert (done.returncode, done.stderr) in ((1, "1 problem\n"), (1, "2 problems\n"))
        elif command == () or (command[0] == "set" and name == "a table for a value"):
            # Not what this command is about.
            assert done.returncode == 0
            return
        else:
            said(done)
    else:
        said(done)
    assert path.read_bytes() == BAD[name]
    assert os.listdir(tmp_path) == ["config.toml"]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("kind", ["directory", "FIFO", "device", "loop", "below a file"])
def test_what_is_no_file_is_an_error(tmp_path: Path, kind: str, command: tuple[str, ...]) -> None:
    """A FIFO would hang, a device could act."""
    path = tmp_path / "config.toml"
    if kind == "directory":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    else:
        path = Path("/dev/zero") if kind == "device" else Path("/dev/null/x")
    done = run("-c", path, *command)
    if kind == "below a file" and command in (("show",), ()):
        assert done.returncode == 0
    else:
        said(done)


@pytest.mark.parametrize("target", ["/dev/stdout", "/proc/self/x", "/dev"])
def test_what_cannot_be_written_is_an_error(target: str) -> None:
    """With the reason, and nothing is made."""
    said(run("default", "-o", target))
    assert Path("/dev/stdout").is_symlink()


@pytest.mark.parametrize("kind", ["device", "FIFO"])
def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path, kind: str) -> None:
    """It would be gone for everybody; the device is the test's own, should the program fail."""
    path = tmp_path / "config.toml"
    if kind == "FIFO":
        os.mkfifo(path)
    elif os.geteuid() == 0:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    else:
        pytest.skip("only root makes a device")
    before = path.stat()
    assert "regular file" in said(run("default", "-o", path))
    assert (path.stat().st_ino, path.stat().st_mode) == (before.st_ino, before.st_mode)


def test_a_link_of_somebody_else_is_not_followed(tmp_path: Path) -> None:
    """Root would write wherever it leads."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (tmp_path / "precious").write_text("x")
    (shared / "config.toml").symlink_to(tmp_path / "precious")
    assert "others can write" in said(run("default", "-o", shared / "config.toml"))
    assert (tmp_path / "precious").read_text() == "x"


def test_a_full_disk_is_an_error() -> None:
    """What is not written is not passed over."""
    with open("/dev/full", "wb") as full:
        done: Any = subprocess.run(
            [sys.executable, "-m", "gpuruntime", "config", "default"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            cwd=TREE,
            timeout=30,
        )
    assert done.returncode == 1
    assert "cannot write to standard output" in done.stderr
