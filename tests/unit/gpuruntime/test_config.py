# SPDX-License-Identifier: Apache-2.0
"""Which config file is in force, what it may say, when a compiled snapshot counts."""

from __future__ import annotations

import json
import os
import posix
import stat
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gpuruntime import __version__, config, probes
from gpuruntime.configfile import compilation
from gpuruntime.errors import ConfigError
from gpuruntime.grant import Grant
from gpuruntime.snapshots import config_snapshot, storage
from gpuruntime.snapshots.grants import SavedGrants

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have the snapshot and its companion in a directory of this test."""
    directory = tmp_path / "run"
    directory.mkdir()
    directory.chmod(0o755)
    monkeypatch.setattr(storage, "RUN_DIRECTORY", str(directory))
    return directory


def toml(place: Path, text: str) -> str:
    """Write a config file and return its path."""
    path = place / "config.toml"
    path.write_text(text)
    return str(path)


RUNTIMES = '[nvidia-container-runtime]\nruntimes = ["/opt/runc"]\n'


def must_not_compile(path: str) -> dict[str, Any]:
    """Fail: the snapshot must do."""
    raise AssertionError(path)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, []),
        ({"GPURUNTIME_CONFIG": "/a"}, ["/a"]),
        ({"NVIDIA_CTK_CONFIG_FILE_PATH": "/b", "GPURUNTIME_CONFIG": "/a"}, ["/a", "/b"]),
        (
            {"XDG_CONFIG_HOME": "/x", "GPURUNTIME_CONFIG": ""},
            ["/x/gpuruntime/config.toml", "/x/nvidia-container-runtime/config.toml"],
        ),
    ],
)
def test_the_search_order(environment: dict[str, str], expected: list[str]) -> None:
    """The launcher has the same list: two programs must not read two files."""
    assert config.search_path(environment) == [
        *expected,
        "/etc/gpuruntime/config.toml",
        "/etc/nvidia-container-runtime/config.toml",
    ]


def test_the_first_file_that_exists_is_in_force(tmp_path: Path) -> None:
    """An environment variable that names nothing does not turn the others off."""
    path = toml(tmp_path, "")
    environment = {"GPURUNTIME_CONFIG": "/no/file", "NVIDIA_CTK_CONFIG_FILE_PATH": path}
    found = config.find(environment)
    assert found is not None
    assert found[0] == path


def test_a_config_that_is_no_file_is_an_error(tmp_path: Path) -> None:
    """Silence would be the defaults in place of what the operator wrote."""
    with pytest.raises(ConfigError, match="not a regular file"):
        config.find({"GPURUNTIME_CONFIG": str(tmp_path)})
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="cannot access"):
        config.find({"GPURUNTIME_CONFIG": str(tmp_path / "loop")})


def test_the_defaults_are_in_force_without_a_file() -> None:
    """A fresh installation works."""
    values = config.Config({}, None)
    assert values.runtimes == ("runc", "crun")
    assert values.spec_dirs == ("/etc/cdi", "/var/run/cdi")
    assert values.default_kind == "nvidia.com/gpu"
    assert (values.mode, values.log_level, values.debug) == ("auto", "info", "/dev/null")
    assert (values.accept_environment, values.accept_mounts) == (True, False)
    assert (values.swarm, values.features, values.driver_root) == ((), frozenset(), "")
    assert values.annotation_prefixes == ("cdi.k8s.io/",)
    assert values["discovery-timeout"] == 30


def test_values_that_are_made_ready_for_use() -> None:
    """A list of names in one string; features, which may be set to false."""
    given = {
        "swarm-resource": "A, ,B,",
        "features.allow-ldconfig-from-container": True,
        "features.ignore-imex-channel-requests": False,
        "missing-gpu": "warn",
    }
    values = config.Config(given, "/x")
    assert values.swarm == ("A", "B")
    assert values.features == {"allow-ldconfig-from-container"}
    assert (values["missing-gpu"], values["health"]) == ("warn", "")


def test_a_snapshot_is_used_until_the_file_changes(tmp_path: Path, run_directory: Path) -> None:
    """The start path does not read TOML; a change is seen without a restart of anything."""
    path = toml(tmp_path, RUNTIMES)
    environment = {"GPURUNTIME_CONFIG": path}
    assert compilation.compile_file(path)[1] == []
    assert config_snapshot.load(environment, must_not_compile).runtimes == ("/opt/runc",)
    asked = []

    def compile_file(path: str) -> dict[str, Any]:
        asked.append(path)
        return {}

    status = os.stat(path)
    for change in ("time", "content", "another file"):
        if change == "time":
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 1))
        elif change == "content":
            toml(tmp_path, RUNTIMES + "# x\n")
        else:
            (tmp_path / "other").write_text(RUNTIMES)
            os.utime(tmp_path / "other", ns=(status.st_atime_ns, status.st_mtime_ns))
            os.replace(tmp_path / "other", path)
        assert config_snapshot.load(environment, compile_file).runtimes == ("runc", "crun")
    assert asked == [path] * 3
    assert sorted(os.listdir(run_directory)) == ["config.json", "launcher"]


def _edited_in_place(place: Path) -> None:
    """Write as many other bytes into the file, and restore its mtime, as editors and rsync can."""
    path = place / "config.toml"
    status = path.stat()
    path.write_text(RUNTIMES.replace("runc", "crun"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _extracted_again(place: Path) -> None:
    """Extract another config.toml of the same size and time from an archive, over the first."""
    source = place / "source"
    source.mkdir()
    (source / "config.toml").write_text(RUNTIMES.replace("runc", "crun"))
    os.utime(source / "config.toml", (1_700_000_000,) * 2)
    with tarfile.open(place / "config.tar", "w") as archive:
        archive.add(source / "config.toml", "config.toml")
    with tarfile.open(place / "config.tar") as archive, archive.extractfile("config.toml") as data:
        # In place, as an extractor does that does not unlink first: the inode stays.
        (place / "config.toml").write_bytes(data.read())
        mtime = archive.getmember("config.toml").mtime
    os.utime(place / "config.toml", (mtime, mtime))


@pytest.mark.parametrize("change", [_edited_in_place, _extracted_again])
def test_a_change_that_restores_size_and_mtime_is_noticed(
    tmp_path: Path, run_directory: Path, change: Callable[[Path], None]
) -> None:
    """A container must not be given what the new config forbids; only ctime differs."""
    path = Path(toml(tmp_path, RUNTIMES))
    os.utime(path, (1_700_000_000,) * 2)
    environment = {"GPURUNTIME_CONFIG": str(path)}
    compilation.compile_file(str(path))
    stamp = config.stamp(str(path), path.stat())
    saved = SavedGrants(str(run_directory))
    saved.use(stamp, {f"{config.RUNTIME}.runtimes": ["/opt/runc"]})
    saved.keep(b"key", Grant({}), probes.read({}), of_inventory=True)
    kept = SavedGrants(str(run_directory))
    assert config_snapshot.load(environment, must_not_compile, kept).runtimes == ("/opt/runc",)
    before = path.stat()
    _await_another_ctime(tmp_path, before.st_ctime_ns)
    change(tmp_path)
    after = path.stat()
    names = ("st_dev", "st_ino", "st_size", "st_mtime_ns")
    assert [getattr(after, n) for n in names] == [getattr(before, n) for n in names]

    def compile_file(path: str) -> dict[str, Any]:
        return compilation.compile_file(path)[0]

    kept = SavedGrants(str(run_directory))
    assert config_snapshot.load(environment, compile_file, kept).runtimes == ("/opt/crun",)
    assert config_snapshot.load(environment, must_not_compile).runtimes == ("/opt/crun",)


def _await_another_ctime(place: Path, ctime_ns: int) -> None:
    """Wait until a change has another ctime: file systems count in ticks of the clock."""
    probe = place / "probe"
    while True:
        probe.write_bytes(b"")
        if probe.stat().st_ctime_ns > ctime_ns:
            return


@pytest.mark.parametrize(
    "spoil", ["writable", "directory", "link", "fifo", "garbage", "deep", "format", "path", "list"]
)
def test_a_snapshot_that_cannot_be_believed_is_not_used(
    tmp_path: Path, run_directory: Path, spoil: str
) -> None:
    """Others could have written it, or it is of another version: slower, never wrong."""
    path = toml(tmp_path, RUNTIMES)
    compilation.compile_file(path)
    snapshot = run_directory / "config.json"
    content = json.loads(snapshot.read_text())
    if spoil == "writable":
        snapshot.chmod(0o666)
    elif spoil == "directory":
        run_directory.chmod(0o777)
    elif spoil in ("link", "fifo"):
        snapshot.rename(run_directory / "real")
        if spoil == "link":
            snapshot.symlink_to("real")
        else:
            os.mkfifo(snapshot)
    else:
        changed = {
            "garbage": "{",
            "deep": "[" * 100_000,
            "format": json.dumps({**content, "format": config_snapshot.FORMAT + 1}),
            "path": json.dumps({**content, "file": ["/other", *content["file"][1:]]}),
            "list": json.dumps([content]),
        }
        snapshot.write_text(changed[spoil])
    loaded = config_snapshot.load({"GPURUNTIME_CONFIG": path}, lambda _: {})
    assert loaded.runtimes == ("runc", "crun")


def test_nobody_else_ever_writes_in_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines run with the umask 0, too; who is quick could hold our lock for ever."""
    made = tmp_path / "run"
    before = []
    chmod = os.chmod

    def look_first(path: str, mode: int) -> None:
        before.append(stat.S_IMODE(made.stat().st_mode))
        chmod(path, mode)

    monkeypatch.setattr(posix, "chmod", look_first)
    for umask, mode in ((0, 0o755), (0o777, 0)):
        old = os.umask(umask)
        try:
            storage.make_directory(str(made))
        finally:
            os.umask(old)
        assert before.pop() == mode
        assert stat.S_IMODE(made.stat().st_mode) == 0o755
        made.rmdir()


def test_the_snapshot_and_the_companion_are_for_everybody_to_read(
    tmp_path: Path, run_directory: Path
) -> None:
    """Rootless runtimes read them; nobody else writes them."""
    path = toml(tmp_path, RUNTIMES)
    compilation.compile_file(path)
    for name in ("config.json", "launcher"):
        assert (run_directory / name).stat().st_mode & 0o7777 == 0o644
    status = os.stat(path)
    assert (
        (run_directory / "launcher")
        .read_text()
        .startswith(
            f"gpuruntime-launcher 3 {__version__}\nconfig {path}\n"
            f"stat {status.st_dev} {status.st_ino} {status.st_size} "
            f"{status.st_mtime_ns} {status.st_ctime_ns}\n"
            "runtime /opt/runc\ncreates pass\nword NVIDIA_\n"
        )
    )


def test_a_name_that_the_companion_cannot_hold_is_not_written(
    tmp_path: Path, run_directory: Path
) -> None:
    """A line break in a name would be another line to the launcher."""
    path = toml(tmp_path, '[nvidia-container-runtime]\nruntimes = ["a\\nruntime /evil"]\n')
    compilation.compile_file(path)
    assert os.listdir(run_directory) == ["config.json"]


def test_an_unknown_key_is_a_warning_with_the_nearest(tmp_path: Path, run_directory: Path) -> None:
    """A misspelling must be heard and must not stop a container."""
    text = '[nvidia-container-runtime]\nlog-levle = "debug"\n[zzz]\nqqq = 1\n'
    values, warnings = compilation.compile_file(toml(tmp_path, text))
    assert values == {}
    assert len(warnings) == 2
    assert '"nvidia-container-runtime.log-levle" has no effect' in warnings[0]
    assert 'nearest known key is "nvidia-container-runtime.log-level"' in warnings[0]
    assert "nearest" not in warnings[1]


def test_many_unknown_keys_are_a_few_warnings(tmp_path: Path, run_directory: Path) -> None:
    """A file of something else must not fill the engine's log."""
    text = "".join(f"k{number} = 1\n" for number in range(1000)) + '"disable-require" = true\n'
    values, warnings = compilation.compile_file(
        toml(tmp_path, f"{text}'nvidia-ctk.path' = '/x'\n")
    )
    assert values == {"disable-require": True}
    assert len(warnings) == 51
    assert "951 more" in warnings[-1]


@pytest.mark.parametrize(
    "text",
    [
        "[nvidia-container-runtime]\nmode = 'jit-cdi'\n",
        "[nvidia-container-cli]\nuser = 'root:video'\nno-cgroups = true\n",
        "[nvidia-container-runtime.modes.jit-cdi]\nnvcdi-feature-flags = ['whatever']\n",
        "nvidia-container-cli.ldconfig = '/x'\nfeatures.allow-ldconfig-from-container = true\n",
    ],
)
def test_what_has_no_effect_is_accepted_silently(
    tmp_path: Path, run_directory: Path, text: str
) -> None:
    """The incumbent's files have it; `config check` is where to ask."""
    assert compilation.compile_file(toml(tmp_path, text))[1] == []


@pytest.mark.parametrize(
    ("text", "values", "warning"),
    [
        ("nvidia-container-runtime.mode = 'nvml'", {f"{config.RUNTIME}.mode": "nvml"}, '"nvml"'),
        (
            "supported-driver-capabilities = 'x'",
            {"supported-driver-capabilities": "x"},
            'has "x": containers that request a GPU fail',
        ),
        ("hook-deadline = 9999", {"hook-deadline": 9999}, "600 is used"),
    ],
)
def test_what_fails_no_other_container_is_a_warning(
    tmp_path: Path, run_directory: Path, text: str, values: dict[str, Any], warning: str
) -> None:
    """Containers without a GPU start; the value is kept, so that the others name it."""
    compiled, warnings = compilation.compile_file(toml(tmp_path, text))
    assert compiled == values
    assert len(warnings) == 1
    assert warning in warnings[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("supported-driver-capabilities = 'compute, sound'\n", '"sound"'),
        ("[nvidia-container-runtime]\nmode = 'magic'\n", '"magic"'),
        ("[nvidia-container-runtime.modes.legacy]\ncuda-compat-mode = 'x'\n", '"x"'),
    ],
)
def test_a_word_that_nobody_knows_is_a_warning(
    tmp_path: Path, run_directory: Path, text: str, said: str
) -> None:
    """The incumbent takes it, and so containers that do not depend on it start."""
    (warning,) = compilation.compile_file(toml(tmp_path, text))[1]
    assert said in warning


def test_an_unknown_log_level_is_a_warning(tmp_path: Path, run_directory: Path) -> None:
    """More or less is written; no container fails."""
    text = '[nvidia-container-runtime]\nlog-level = "loud"\n'
    values, warnings = compilation.compile_file(toml(tmp_path, text))
    assert config.Config(values, None).log_level == "info"
    assert '"loud"' in warnings[0]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("x = [", "not valid TOML"),
        ("[nvidia-container-runtime]\nruntimes = 'runc'", "a list of strings"),
        ("[nvidia-container-runtime]\nruntimes = [1]", "a list of strings"),
        ("[nvidia-container-runtime]\nruntimes = ['']", "has an empty string"),
        ("[nvidia-container-runtime]\nruntimes = []", "is empty"),
        ("[nvidia-container-runtime]\nmode = 1", "a string"),
        ("[nvidia-container-runtime.modes.cdi]\ndefault-kind = 'gpu'", "default-kind"),
        ("[nvidia-container-runtime.modes.cdi]\ndefault-kind = 'a/b=c'", "default-kind"),
        ("#" * (1 << 20) + "##", "more than"),
        ("\n\ndisable-require = 0", 'line 3: "disable-require" is not true or false'),
        ("discovery-timeout = true", "a whole number above 0"),
        ("discovery-timeout = -1", "a whole number above 0"),
        ("health = 'xid'", '"health" is "xid"'),
        ("missing-gpu = 'hide'", '"missing-gpu" is "hide"'),
        ("nvidia-container-cli = 1", "is not a table"),
        ("[[nvidia-container-cli]]", "is not a table"),
        ("[disable-require]", "true or false"),
        ("[nvidia-container-cli]\nldconfig = '/sbin/ldconfig'", "invalid config value"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_file_and_key(
    tmp_path: Path, run_directory: Path, text: str, named: str
) -> None:
    """And nothing is compiled from it."""
    path = toml(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        compilation.compile_file(path)
    assert path in error.value.message
    assert named in error.value.message
    assert error.value.hint
    assert os.listdir(run_directory) == []


def test_a_directory_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rootless: each start compiles, which is slow and right."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(storage, "RUN_DIRECTORY", str(tmp_path / "file" / "run"))
    values, warnings = compilation.compile_file(toml(tmp_path, RUNTIMES))
    assert values == {"nvidia-container-runtime.runtimes": ["/opt/runc"]}
    assert "each start compiles" in warnings[0]
