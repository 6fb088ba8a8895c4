# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime runtime configure`, as a program: what it prints, writes, refuses, and undoes."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import forked_cli
import pytest

# Each test starts the command line, most of them several times.
pytestmark = pytest.mark.slow

TREE = Path(__file__).parents[4]
PROGRAM = "/usr/bin/env"
DOCKER = b'{\n  "log-driver": "local"\n}\n'
CONTAINERD = b"""\
version = 2
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
"""


class Engine:
    """The command, with its records in a directory of the test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state = directory / "state"

    def run(
        self, *arguments: object, program: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `runtime configure` with *arguments*."""
        words = ("runtime", "configure", *map(str, arguments))
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.directory),
            "GPURUNTIME_STATE_DIRECTORY": str(self.state),
        }
        if program is None:
            return forked_cli.run(*words, env=environment)
        return subprocess.run(
            [str(program), *words],
            capture_output=True,
            text=True,
            check=False,
            cwd=TREE,
            timeout=60,
            env={**environment, "PYTHONPATH": str(TREE)},
        )

    def docker(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run it on the docker config of the test."""
        return self.run(
            *("--runtime", "docker", "--config", self.directory / "daemon.json"),
            *("--runtime-path", PROGRAM, *arguments),
        )


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """Return the command, beside a docker config."""
    (tmp_path / "daemon.json").write_bytes(DOCKER)
    return Engine(tmp_path)


# Values that are wrong whatever the host and its files are.
WRONG_USAGE = (
    "unrecognized|is not absolute|is not an absolute path|does not support drop-in configs|"
    "invalid runtime name|own runtime"
)


def said(done: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    """Return error and hint of a command that fails as it must: nothing else on either stream."""
    assert done.returncode == (2 if re.search(WRONG_USAGE, done.stderr) else 1), done
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    *warnings, error, hint = done.stderr.splitlines()
    assert all(line.startswith("warning: ") for line in warnings)
    assert error.startswith("error: configuration: ")
    assert hint.startswith("hint: ")
    return error, hint


def snapshot(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return inode, time of change and content of everything in *directory*."""
    found = {}
    for path in sorted([directory, *directory.rglob("*")]):
        status = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found[str(path)] = (status.st_ino, status.st_mtime_ns, data)
    return found


def test_configure_says_what_it_wrote_and_what_to_restart(engine: Engine) -> None:
    """The most frequent mistake is not to restart; the second, to restart the wrong service."""
    path = engine.directory / "daemon.json"
    done = engine.docker("--set-as-default", "--cdi.enabled")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines() == [
        f'wrote "{path}"',
        'to put it into effect, run "systemctl restart docker"',
    ]
    assert json.loads(path.read_text()) == {
        "log-driver": "local",
        "default-runtime": "gpuruntime",
        "features": {"cdi": True},
        "runtimes": {"gpuruntime": {"path": PROGRAM, "args": []}},
    }


def test_configure_again_says_unchanged_and_nothing_to_restart(engine: Engine) -> None:
    """Automation runs it at each boot."""
    engine.docker()
    before = snapshot(engine.directory)
    done = engine.docker()
    path = engine.directory / "daemon.json"
    assert (done.returncode, done.stderr) == (0, f'unchanged "{path}"\n')
    assert snapshot(engine.directory) == before


def test_undo_gives_back_the_file_and_says_what_to_restart(engine: Engine) -> None:
    """Every byte, and the records are gone too."""
    before = set(engine.directory.iterdir())
    engine.docker()
    done = engine.docker("--undo")
    assert done.returncode == 0
    assert 'run "systemctl restart docker"' in done.stderr
    assert (engine.directory / "daemon.json").read_bytes() == DOCKER
    assert set(engine.directory.iterdir()) == before
    again = engine.docker("--undo")
    assert again.stderr.startswith("unchanged ")


def test_a_check_prints_what_differs(engine: Engine) -> None:
    """0 if the engine is configured as asked for, 1 if not; nothing is written."""
    before = snapshot(engine.directory)
    done = engine.docker("--check")
    assert done.returncode == 1
    assert '+    "gpuruntime": {' in done.stdout
    assert done.stderr.startswith("differs ")
    assert snapshot(engine.directory) == before
    engine.docker()
    right = engine.docker("--check")
    assert (right.returncode, right.stdout) == (0, "")
    assert right.stderr.startswith("unchanged ")
    # Another manager has written its own file.
    (engine.directory / "daemon.json").write_bytes(DOCKER)
    assert engine.docker("--check").returncode == 1
    engine.docker()
    more = engine.docker("--check", "--set-as-default")
    assert more.returncode == 1
    assert '+  "default-runtime": "gpuruntime"' in more.stdout


def test_a_dry_run_prints_the_new_config_and_writes_nothing(engine: Engine) -> None:
    """Standard output is the file, as the incumbent prints it; the diff is a note beside it."""
    before = snapshot(engine.directory)
    done = engine.docker("--dry-run")
    assert done.returncode == 0
    path = engine.directory / "daemon.json"
    assert done.stderr.startswith(f"--- {path}\n+++ {path}\n@@ -1,3 +1,9 @@\n")
    assert done.stderr.endswith(f'\ndiffers "{path}"\n')
    assert snapshot(engine.directory) == before
    engine.docker()
    assert done.stdout == path.read_text()
    again = engine.docker("--dry-run")
    assert (again.stdout, again.stderr) == (path.read_text(), f'unchanged "{path}"\n')


def test_a_dry_run_of_an_undo_prints_what_will_be_left(engine: Engine) -> None:
    """Of a file that will be removed there is nothing to print."""
    engine.docker()
    before = snapshot(engine.directory)
    done = engine.docker("--undo", "--dry-run")
    assert (done.returncode, done.stdout) == (0, DOCKER.decode())
    path = engine.directory / "new.json"
    words = ("--runtime", "docker", "--config", path, "--runtime-path", PROGRAM)
    assert snapshot(engine.directory) == before
    engine.run(*words)
    done = engine.run(*words, "--undo", "--dry-run")
    assert (done.returncode, done.stdout) == (0, "")
    assert "+++ /dev/null" in done.stderr


def test_a_dry_run_names_each_of_several_files(engine: Engine) -> None:
    """In comments, which both files of containerd can have."""
    path = engine.directory / "config.toml"
    path.write_bytes(CONTAINERD)
    words = ("--runtime", "containerd", "--config", path, "--runtime-path", PROGRAM)
    done = engine.run(*words, "--dry-run")
    drop_in = engine.directory / "conf.d" / "99-gpuruntime.toml"
    engine.run(*words)
    assert done.stdout == f"# {drop_in}\n{drop_in.read_text()}# {path}\n{path.read_text()}"


@pytest.mark.parametrize(
    "spelling",
    ["--cdi.enabled", "--cdi.enable", "--enable-cdi", "--cdi.enabled=true", "--cdi.enabled=1"],
)
def test_flags_have_the_incumbent_s_spellings(engine: Engine, spelling: str) -> None:
    """Scripts stay as they are."""
    engine.docker(spelling, "--nvidia-set-as-default", "--nvidia-runtime-name=nv")
    document = json.loads((engine.directory / "daemon.json").read_text())
    assert document["features"] == {"cdi": True}
    assert document["default-runtime"] == "nv"


def test_a_flag_can_be_false(engine: Engine) -> None:
    """As generated command lines have it."""
    engine.docker("--cdi.enabled=false", "--set-as-default=false", "--dry-run=false")
    document = json.loads((engine.directory / "daemon.json").read_text())
    assert set(document) == {"log-driver", "runtimes"}


def test_the_modes_exclude_each_other(engine: Engine) -> None:
    """A check of an undo, and a check that prints no difference, have no meaning."""
    assert engine.docker("--undo", "--check").returncode == 2
    assert engine.docker("--dry-run", "--check").returncode == 2


def test_called_by_the_incumbent_s_name_it_has_the_incumbent_s_defaults(
    engine: Engine, tmp_path: Path
) -> None:
    """Name and programs; docker finds a bare name on PATH, the others want a path."""
    program = tmp_path / "nvidia-ctk"
    program.symlink_to(Path(sys.prefix, "bin", "gpuruntime"))
    path = tmp_path / "daemon.json"
    engine.run("--config", path, program=program)
    document = json.loads(path.read_text())
    assert document["runtimes"] == {"nvidia": {"path": "nvidia-container-runtime", "args": []}}
    drop_in = tmp_path / "crio.conf.d" / "99-nvidia.toml"
    done = engine.run(
        *("--runtime", "crio", "--config", tmp_path / "crio.conf", "--drop-in-config", drop_in),
        program=program,
    )
    assert "there is no program" in done.stderr
    assert tomllib.loads(drop_in.read_text())["crio"]["runtime"]["runtimes"] == {
        "nvidia": {"runtime_path": "/usr/bin/nvidia-container-runtime", "runtime_type": "oci"}
    }
    hook = engine.run("--config-mode=oci-hook", program=program)
    assert json.loads(hook.stdout)["hook"]["path"] == "/usr/bin/nvidia-container-runtime-hook"


def test_containerd_s_drop_in_is_beside_its_config(engine: Engine) -> None:
    """And goes again with the directory that was made for it."""
    path = engine.directory / "etc" / "config.toml"
    path.parent.mkdir()
    path.write_bytes(CONTAINERD)
    words = ("--engine", "containerd", "--config", path, "--runtime-path", PROGRAM)
    done = engine.run(*words)
    drop_in = path.parent / "conf.d" / "99-gpuruntime.toml"
    assert done.stderr.splitlines() == [
        f'wrote "{drop_in}"',
        f'wrote "{path}"',
        'to put it into effect, run "systemctl restart containerd"',
    ]
    assert tomllib.loads(path.read_text())["imports"] == [f"{drop_in.parent}/*.toml"]
    engine.run(*words, "--undo")
    assert path.read_bytes() == CONTAINERD
    assert [item.name for item in path.parent.iterdir()] == ["config.toml"]


@pytest.mark.parametrize("engine_name", ["crio", "podman"])
def test_a_config_of_one_s_own_is_edited_itself(engine: Engine, engine_name: str) -> None:
    """Whoever runs CRI-O or podman on another file has no drop-in directory for it."""
    path = engine.directory / "own.conf"
    words = ("--engine", engine_name, "--config", path, "--runtime-path", PROGRAM)
    assert engine.run(*words).returncode == 0
    assert PROGRAM in path.read_text()
    assert engine.run(*words, "--undo").returncode == 0
    assert not path.exists()


def test_mode_and_owner_and_links_are_kept(engine: Engine) -> None:
    """A config with a registry's password is 0600; one of a config manager is a link."""
    real = engine.directory / "real.json"
    real.write_bytes(DOCKER)
    real.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(real, 12, 34)
    owner = (real.stat().st_uid, real.stat().st_gid)
    path = engine.directory / "daemon.json"
    path.unlink()
    path.symlink_to("real.json")
    for words in ((), ("--undo",)):
        assert engine.docker(*words).returncode == 0
        status = real.stat()
        assert (status.st_uid, status.st_gid) == owner
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert os.readlink(path) == "real.json"
    assert real.read_bytes() == DOCKER


def test_the_record_of_a_secret_is_a_secret(engine: Engine) -> None:
    """It holds the whole file as it was."""
    engine.docker()
    (record,) = engine.state.iterdir()
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    assert stat.S_IMODE(engine.state.stat().st_mode) == 0o700


BAD = {
    "invalid JSON": ("docker", b'{\n  "a": 1,\n}\n', "line 3 column 1"),
    "a list": ("docker", b"[]", "not a JSON object"),
    # What docker 20.10 ignores, docker 23 refuses.
    "something behind the object": (
        "docker",
        b'{"a": 1} {"b": 2}',
        "Extra data: line 1 column 10",
    ),
    "a NUL behind the object": ("docker", b'{"a": 1}\0', "Extra data"),
    "a NUL in a text": ("docker", b'{"a": "\0"}', "line 1 column 8"),
    "a comment": ("docker", b'// x\n{"a": 1}', "line 1 column 1"),
    "UTF-16": ("docker", '{"a": 1}'.encode("utf-16"), "line 1 is not UTF-8"),
    # Refused by dockerd, the same as "runtimes" for podman and CRI-O, ignored by containerd 1.
    "docker's key in capitals": ("docker", b'{"Runtimes": {}}', 'has the key "Runtimes"'),
    "podman's key in capitals": ("podman", b'[Engine]\nruntime = "x"\n', 'has the key "Engine"'),
    "CRI-O's key in capitals": ("crio", b"[crio.Runtime]\n", 'has the key "Runtime"'),
    "containerd's key in capitals": ("containerd", b"Version = 2\n", 'has the key "Version"'),
    "a plugin's key in capitals": (
        "containerd",
        b'version = 2\n[plugins."io.containerd.grpc.v1.cri".Containerd.runtimes.x]\n',
        'has the key "Containerd"',
    ),
    "imports are no pattern": (
        "containerd",
        b'version = 2\nimports = ["/x/[*.toml"]\n',
        "an import that is not valid",
    ),
    "a key twice": ("docker", b'{"runtimes": {}, "runtimes": {}}', 'the key "runtimes" twice'),
    "a key twice inside": ("docker", b'{"a": {"b": 1, "b": 2}}', 'the key "b" twice'),
    "NaN": ("docker", b'{"a": NaN}', "NaN"),
    "runtimes are a list": ("docker", b'{"runtimes": []}', '"runtimes", which is not a table'),
    "features are a text": ("docker", b'{"features": "cdi"}', '"features", which is not a table'),
    "a byte order mark in TOML": ("containerd", b"\xef\xbb\xbfversion = 2\n", "byte order mark"),
    "no UTF-8": ("docker", b'{\n"a": "\xff"}', "line 2 is not UTF-8"),
    "too big": ("docker", b"{" + b" " * (10 << 20) + b"}", "more than 1048576 bytes"),
    "too deep": ("docker", b'{"a": ' + b"[" * 100_000, "not valid JSON"),
    "invalid TOML": ("containerd", b"version = 2\nx = = 1\n", "(at line 2, column 5)"),
    "a TOML key twice": ("containerd", b"version = 2\nversion = 2\n", "(at line 2, column "),
    "a key of a million parts": ("containerd", b"a." * 100_000 + b"a = 1", "too many parts"),
    "imports are a text": ("containerd", b'version = 2\nimports = "x"\n', "not a list of strings"),
    "plugins are a list": ("containerd", b"version = 2\nplugins = []\n", '"plugins", which is no'),
    "version is a text": ("containerd", b'version = "2"\n', "not a positive integer"),
    "runc is no table": (
        "containerd",
        b'version = 3\nplugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc = 1\n',
        "runc",
    ),
    "annotations are a text": (
        "containerd",
        b"version = 1\n[plugins.cri.containerd.runtimes.runc]\ncontainer_annotations = 'x'\n",
        "not a list of strings",
    ),
    "CRI-O's runtimes are a list": (
        "crio",
        b"[crio.runtime]\nruntimes = []\n",
        '"crio.runtime.runtimes", which is not a table',
    ),
    "podman's JSON runtimes are a text": (
        "podman",
        b'[engine]\nruntime_supports_json = "runc"\n',
        "which is not a list",
    ),
}


@pytest.mark.parametrize("data", [b"", b" \n\t\r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf{}\n"])
def test_what_dockerd_reads_as_an_empty_config_is_one(engine: Engine, data: bytes) -> None:
    """A text of blanks and a byte order mark, as dockerd accepts them since 23.0."""
    path = engine.directory / "daemon.json"
    path.write_bytes(data)
    done = engine.docker()
    mark = b"\xef\xbb\xbf"
    assert ("docker before 23.0" in done.stderr) == data.startswith(mark)
    assert path.read_bytes().startswith(mark) == data.startswith(mark)
    document = json.loads(path.read_bytes().removeprefix(mark))
    assert document == {"runtimes": {"gpuruntime": {"path": PROGRAM, "args": []}}}
    assert engine.docker().stderr.endswith(f'unchanged "{path}"\n')
    engine.docker("--undo")
    assert path.read_bytes() == data


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_named_and_left_alone(engine: Engine, case: str) -> None:
    """With what is wrong and where; neither a traceback nor a write, in any of the modes."""
    name, data, what = BAD[case]
    path = engine.directory / "bad"
    path.write_bytes(data)
    before = snapshot(engine.directory)
    words = ("--runtime", name, "--config", path, "--runtime-path", PROGRAM, "--cdi.enabled=true")
    words = (*words, "--container-annotations", "a/")
    for more in ((), ("--dry-run",), ("--check",)):
        error, _ = said(engine.run(*words, *more))
        assert f'"{path}"' in error
        assert what in error
    assert snapshot(engine.directory) == before


def test_what_is_no_file_is_named(engine: Engine) -> None:
    """A directory, a FIFO, a link to nothing; none hangs."""
    (engine.directory / "directory").mkdir()
    os.mkfifo(engine.directory / "fifo")
    (engine.directory / "dangling").symlink_to("nothing")
    for name in ("directory", "fifo", "dangling", "daemon.json/x"):
        error, _ = said(engine.run("--runtime", "docker", "--config", engine.directory / name))
        assert str(engine.directory / name) in error


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_a_link_where_others_may_write_is_not_followed(engine: Engine) -> None:
    """It could lead anywhere, and we are root."""
    directory = engine.directory / "open"
    directory.mkdir()
    directory.chmod(0o777)
    (directory / "daemon.json").symlink_to(engine.directory / "daemon.json")
    error, _ = said(
        engine.run("--runtime", "docker", "--config", directory / "daemon.json", "--check")
    )
    assert "a symlink in a directory that others can write to" in error


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--runtime", "lxc"), "unrecognized runtime 'lxc'"),
        (("--runtime", "docker-snap"), "mount namespace"),
        (("--runtime=docker", "--config=/var/snap/docker/current/config/daemon.json"), "snap"),
        (("--runtime=docker", "--drop-in-config=/x"), "docker does not support drop-in configs"),
        (("--runtime=k3s", "--drop-in-config=/x"), "k3s does not support drop-in configs"),
        (("--runtime=crio", "--drop-in-config=x"), "not an absolute path"),
        (("--runtime=containerd", "--runtime-path=x"), "not absolute"),
        (("--runtime=docker", "--runtime-name=a b"), 'invalid runtime name "a b"'),
        (("--runtime=docker", "--runtime-name=runc"), "own runtime"),
        (("--runtime=crio", "--config-source=x"), 'unrecognized config source "x"'),
        (("--runtime=k3s", "--set-as-default"), "does not start with a default runtime"),
        (("--runtime=microk8s",), "containerd-template.toml"),
        (("--config-mode=hook", "--runtime-hook-path=x"), "not absolute"),
    ],
)
def test_what_cannot_be_is_refused(engine: Engine, words: tuple[str, ...], what: str) -> None:
    """With one thing to do."""
    error, _ = said(engine.run(*words, "--dry-run"))
    assert what in error


def test_the_config_of_the_running_program_is_asked_for(engine: Engine) -> None:
    """Its options are copied, not those of a file that it does not read."""
    program = engine.directory / "containerd"
    program.write_text(
        "#!/bin/sh\ncat <<'E'\nversion = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd."
        "runtimes.runc]\nruntime_type = 't'\n[plugins.'io.containerd.cri.v1.runtime'.containerd."
        "runtimes.runc.options]\nSystemdCgroup = true\nE\n"
    )
    program.chmod(0o755)
    path = engine.directory / "config.toml"
    words = ("--runtime=containerd", "--config-source=command", "--config", path)
    words = (*words, "--executable-path", program, "--runtime-path", PROGRAM)
    assert engine.run(*words).returncode == 0
    drop_in = engine.directory / "conf.d" / "99-gpuruntime.toml"
    document = tomllib.loads(drop_in.read_text())
    plugin = document["plugins"]["io.containerd.cri.v1.runtime"]["containerd"]["runtimes"]
    assert document["version"] == 3
    assert plugin["gpuruntime"] == {
        "runtime_type": "t",
        "options": {"SystemdCgroup": True, "BinaryName": PROGRAM},
    }
    assert tomllib.loads(path.read_text())["version"] == 3


def test_a_program_of_another_containerd_is_found_out(engine: Engine) -> None:
    """Docker's containerd on PATH, another's config: what it prints is not for that file."""
    program = engine.directory / "containerd"
    program.write_text("#!/bin/sh\necho 'version = 2'\n")
    program.chmod(0o755)
    path = engine.directory / "config.toml"
    path.write_text("version = 3\n")
    words = ("--runtime=containerd", "--config-source=command", "--config", path)
    error, _ = said(engine.run(*words, "--executable-path", program, "--runtime-path", PROGRAM))
    assert "belongs to another one" in error
    program.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    error, _ = said(engine.run(*words, "--executable-path", program, "--runtime-path", PROGRAM))
    assert "status 3: broken" in error


def test_no_program_on_path_is_ever_asked_for_the_version(engine: Engine) -> None:
    """It may be another engine's: the file says it, and a new file is what all can read."""
    marker = engine.directory / "asked"
    for name in ("containerd", "docker", "dockerd", "crio", "podman"):
        program = engine.directory / name
        program.write_text(f"#!/bin/sh\ntouch {marker}\n")
        program.chmod(0o755)
    path = str(engine.directory / "config.toml")
    words = ("--runtime=containerd", "--config", path, "--runtime-path", PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "gpuruntime", "runtime", "configure", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=TREE,
        env={"PATH": str(engine.directory), "GPURUNTIME_STATE_DIRECTORY": str(engine.state)},
    )
    assert done.returncode == 0
    assert not marker.exists()


def test_a_hook_file_is_written_and_undone(engine: Engine) -> None:
    """For engines that know neither runtimes nor CDI."""
    path = engine.directory / "hooks.d" / "hook.json"
    words = ("--config-mode", "oci-hook", "--oci-hook-path", path)
    words = (*words, "--nvidia-runtime-hook-path", "/opt/x/hook")
    assert engine.run(*words).stderr == f'wrote "{path}"\n'
    document = json.loads(path.read_text())
    assert document["hook"]["args"] == ["hook", "prestart"]
    assert document["hook"]["env"][0].endswith(":/bin:/opt/x")
    assert document["when"] == {"always": True, "commands": [".*"]}
    assert document["stages"] == ["prestart"]
    assert engine.run(*words, "--check").returncode == 0
    engine.run(*words, "--undo")
    assert not path.parent.exists()


def test_state_that_cannot_be_kept_is_an_error_before_any_write(engine: Engine) -> None:
    """Without it there is no undo."""
    engine.state.write_text("in the way")
    error, hint = said(engine.docker())
    assert str(engine.state) in error
    assert "--state-dir" in hint
    engine.state.unlink()
    engine.state.symlink_to(engine.directory / "proc" / "nothing")
    (engine.directory / "proc").write_text("")
    error, hint = said(engine.docker())
    assert str(engine.state) in error
    assert "--state-dir" in hint
    assert (engine.directory / "daemon.json").read_bytes() == DOCKER
