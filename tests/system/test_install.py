# SPDX-License-Identifier: Apache-2.0
"""`make install` and `make uninstall`: what is put where, how it works there, what is left."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import start_code
from scenarios.machine import SCENARIOS, run_on_host

from gpuruntime import bytecode

TREE = Path(__file__).parents[2]
PREFIX = "usr/local"
LIBRARY = f"{PREFIX}/lib/gpuruntime"
OURS = ["gpu-cdi-hook", "gpu-container-runtime", "gpu-container-runtime-hook", "gpuruntime"]
INCUMBENTS = [
    *("nvidia-cdi-hook", "nvidia-container-cli", "nvidia-container-runtime"),
    *("nvidia-container-runtime-hook", "nvidia-container-runtime.cdi"),
    *("nvidia-container-runtime.legacy", "nvidia-container-toolkit", "nvidia-ctk"),
]
CONFIG = "etc/nvidia-container-runtime/config.toml"
MANIFEST = f"{LIBRARY}/manifest"
pytestmark = pytest.mark.system("make", "gcc")


def make(target: str, place: Path, *options: str, **environment: str) -> tuple[int, str]:
    """Have the Makefile do *target* below *place*; return its status and errors."""
    # What an outer make tells its children is not for this one.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "--no-print-directory", target, f"DESTDIR={place}", f"PYTHON={sys.executable}",
         *options],
        cwd=TREE, env={**kept, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == ""
    return done.returncode, done.stderr


def installed_into(place: Path, *options: str, **environment: str) -> Path:
    """Install below *place* and return it."""
    status, errors = make("install", place, *options, **environment)
    assert status == 0, errors
    return place


def contents(place: Path) -> dict[str, tuple[str, str]]:
    """Return path → mode, and digest or target, of everything below *place*."""
    found = {}
    for directory, names, others in os.walk(place):
        for name in names + others:
            path = Path(directory, name)
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                what = os.readlink(path)
            elif stat.S_ISREG(mode):
                what = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                what = "directory"
            found[str(path.relative_to(place))] = (f"{mode:o}", what)
    return found


def loose(place: Path) -> list[str]:
    """Return what below *place* is another user's, or has a mode that it should not have."""
    found = []
    for directory, names, others in os.walk(place):
        for name in names + others:
            path = Path(directory, name)
            status = path.lstat()
            allowed = {0o755} if path.is_dir() else {0o644, 0o755}
            owned = status.st_uid == status.st_gid == 0
            modes = stat.S_ISLNK(status.st_mode) or stat.S_IMODE(status.st_mode) in allowed
            if not (owned and modes):
                found.append(str(path.relative_to(place)))
    return found


@pytest.fixture(scope="module")
def compat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an installation with the incumbent's names."""
    return installed_into(tmp_path_factory.mktemp("compat"), "COMPAT=nvidia")


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """Return what was seen of an installation in use, on a simulated host."""
    return run_on_host(SCENARIOS / "installed.py")


def test_programs_are_there_under_their_names(compat: Path) -> None:
    """All of the launcher are one file: the runtime must know itself by its inode."""
    programs = compat / PREFIX / "bin"
    assert sorted(os.listdir(programs)) == sorted(OURS + INCUMBENTS)
    launcher = (compat / LIBRARY / "launcher").stat()
    for name in OURS + INCUMBENTS:
        is_launcher = name not in ("gpuruntime", "nvidia-container-cli")
        assert ((programs / name).stat().st_ino == launcher.st_ino) is is_launcher
    # What the launcher becomes by this name where it is no hook.
    tool = compat / LIBRARY / "nvidia-ctk"
    assert tool.resolve() == (programs / "gpuruntime").resolve()
    for name in OURS + INCUMBENTS:
        # A link that leaves its own directory tree would break below a DESTDIR.
        if (programs / name).is_symlink():
            assert not os.readlink(programs / name).startswith("/")


def test_perm_01_nothing_is_writable_or_privileged(compat: Path, tmp_path: Path) -> None:
    """All of it runs as root, for containers of everybody."""
    assert loose(compat) == []
    # The controls: one bit each.
    program = shutil.copy(compat / PREFIX / "bin" / "gpuruntime", tmp_path / "program")
    for mode in (0o4755, 0o2755, 0o775, 0o757, 0o666, 0o600):
        os.chmod(program, mode)
        assert loose(tmp_path) == ["program"]
    os.chmod(program, 0o755)
    assert loose(tmp_path) == []
    os.chown(program, 1, 0)
    assert loose(tmp_path) == ["program"]


def test_every_module_has_bytecode_that_is_never_checked(compat: Path) -> None:
    """Without it a start costs six times as much; with times in it no two builds are the same."""
    modules = list((compat / LIBRARY).rglob("*.py"))
    assert len(modules) > 250
    for module in modules:
        (compiled,) = (module.parent / "__pycache__").glob(f"{module.stem}.cpython-*.pyc")
        assert int.from_bytes(compiled.read_bytes()[4:8], "little") == 1
    for compiled in (compat / LIBRARY / "hooks").rglob("*.pyc"):
        data = compiled.read_bytes()
        assert f"/{LIBRARY}/hooks/".encode() in data
        assert os.fsencode(TREE) not in data


def test_each_role_has_its_bytecode_in_one_file(compat: Path) -> None:
    """Of the launcher's interpreter, never checked, and with the paths of the installed tree."""
    for role in bytecode.ROLES:
        (path,) = (compat / LIBRARY / "gpuruntime/__pycache__").glob(f"start-{role}.*")
        data = path.read_bytes()
        assert f"/{LIBRARY}/gpuruntime/errors.py".encode() in data
        assert os.fsencode(TREE) not in data
        # As where the modules have not changed, and these have just been installed.
        code = start_code.code(compat / LIBRARY, role).rpartition("\n")[0]
        code += "\nprint(sys.modules['gpuruntime.errors'].__spec__)"
        words = ("/usr/bin/python3", "-I", "-S", "-B", "-X", "utf8", "-c", code)
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        assert done.stdout == "None\n"


def test_each_question_of_the_slow_path_has_its_bytecode_in_one_file(compat: Path) -> None:
    """Of the command line's interpreter, with the paths of the installed tree."""
    for question in bytecode.QUESTIONS:
        (path,) = (compat / LIBRARY / "gpuruntime/__pycache__").glob(f"start-{question}.*")
        data = path.read_bytes()
        assert f"/{LIBRARY}/gpuruntime/slowpath_server.py".encode() in data
        assert os.fsencode(TREE) not in data


def test_a_second_build_is_the_same_to_the_byte(compat: Path, tmp_path: Path) -> None:
    """Packagers compare; neither the time, the place, the mask nor the locale may show."""
    again = tmp_path / "elsewhere"
    umask = os.umask(0o077)
    try:
        installed_into(again, "COMPAT=nvidia", SOURCE_DATE_EPOCH="86400", TZ="Asia/Tokyo",
                       LC_ALL="C.UTF-8", PYTHONHASHSEED="5")  # fmt: skip
    finally:
        os.umask(umask)
    assert contents(again) == contents(compat)
    times = {path.lstat().st_mtime for path in again.rglob("*") if not path.is_dir()}
    assert times == {86400.0}
    # The control: it is a comparison of bytes.
    (again / MANIFEST).write_text("f /bin/sh\n")
    assert contents(again) != contents(compat)


def test_units_man_pages_and_completions_fit_the_prefix(compat: Path) -> None:
    """A unit that names a program that is not there does nothing, and says nothing."""
    top = compat / PREFIX
    for unit in [*top.glob("lib/systemd/*/*"), *top.glob("lib/udev/rules.d/*")]:
        text = unit.read_text()
        assert "/usr/bin/gpuruntime" not in text
        for path in re.findall(r"/usr/local/[\w./-]+", text):
            assert (compat / path[1:]).is_file(), path
    names = {path.name for path in (top / "lib/systemd/system").iterdir()}
    assert names >= {"gpuruntime-nodes.service", "gpuruntime-cdi-refresh.timer"}
    pages = {path.name for path in top.glob("share/man/man?/*")}
    assert pages >= {"gpuruntime.1", "gpuruntime-cdi-generate.1", "gpu-container-runtime.8"}
    assert pages >= {"nvidia-ctk.1", "nvidia-container-cli-info.1", "nvidia-container-runtime.8"}
    page = (top / "share/man/man1/gpuruntime-cdi-generate.1").read_text()
    assert ".B \\-\\-driver\\-root TEXT\n" in page
    for place in ("bash-completion/completions/gpuruntime", "zsh/site-functions/_gpuruntime"):
        assert "_GPURUNTIME_COMPLETE" in (top / "share" / place).read_text()


@pytest.mark.system("make", "gcc", "groff")
def test_man_pages_are_troff(compat: Path) -> None:
    """A character or a line that troff reads as its own is lost to the reader."""
    pages = compat / PREFIX / "share" / "man"
    paths = list(pages.glob("man?/*"))
    assert len(paths) > 20
    for path in paths:
        command = ["groff", "-man", "-Tutf8", "-ww", "-I", str(pages), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), path
        assert "gpuruntime" in done.stdout or "container" in done.stdout


@pytest.mark.system("make", "gcc", "systemd-analyze")
def test_installed_units_are_understood(compat: Path, tmp_path: Path) -> None:
    """Paths were put into them."""
    units = []
    for unit in (compat / PREFIX / "lib/systemd/system").iterdir():
        text = unit.read_text().replace("/usr/local/", f"{compat}/usr/local/")
        units.append(tmp_path / unit.name)
        units[-1].write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_uninstall_leaves_what_is_others(tmp_path: Path) -> None:
    """What others have put there is theirs, also within our own directories, and a config is."""
    # No installed file names its place, and that is one word of the shell.
    place = tmp_path / "it's a place"
    for name in (f"{LIBRARY}/hooks/mine.py", f"{PREFIX}/bin/other", "etc/gpuruntime/config.toml"):
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine\n")
    os.chmod(place / PREFIX / "bin", 0o2775)
    before = contents(place)
    installed_into(place, "COMPAT=nvidia")
    assert before.items() < contents(place).items()
    # It is made where there is none, kept where there is one, and kept if it was changed.
    config = place / CONFIG
    assert 'driver-capabilities = "all"' in config.read_text()
    config.write_text("# mine\n")
    # Again, as for a newer version; one file is no longer part of it.
    with (place / MANIFEST).open("a") as manifest:
        manifest.write(f"f /{LIBRARY}/gone.py\n")
    (place / LIBRARY / "gone.py").write_text("")
    installed_into(place)
    assert not (place / LIBRARY / "gone.py").exists()
    assert not (place / PREFIX / "bin" / "nvidia-ctk").exists()
    installed_into(place, "COMPAT=nvidia")
    assert config.read_text() == "# mine\n"
    status, errors = make("uninstall", place)
    left = f'left "{config}": it was changed'
    assert (status, left in errors) == (0, True), errors
    assert f'uninstalled from "{place}/{PREFIX}"\n' in errors
    found = contents(place)
    assert found.pop(CONFIG)
    assert found.pop(os.path.dirname(CONFIG)) == ("40755", "directory")
    assert found == before
    status, errors = make("uninstall", place)
    assert status != 0
    assert "nothing was installed by us" in errors


def test_what_ended_early_is_undone_or_done_again(tmp_path: Path) -> None:
    """Half of the files are there by then: they must not count as another package's."""
    obstacle = tmp_path / PREFIX / "share" / "man"
    obstacle.parent.mkdir(parents=True)
    obstacle.symlink_to("nowhere")
    # A link in place of a config is the user's too, also while what it leads to is not there.
    config = tmp_path / CONFIG
    config.parent.mkdir(parents=True)
    config.symlink_to("managed.toml")
    before = contents(tmp_path)
    status, errors = make("install", tmp_path, "COMPAT=nvidia")
    assert status != 0
    assert str(obstacle) in errors
    assert (tmp_path / MANIFEST).exists()
    other = tmp_path.with_name(f"{tmp_path.name}-other")
    subprocess.run(["cp", "-a", tmp_path, other], check=True)
    assert make("uninstall", other) == (0, f'uninstalled from "{other}/{PREFIX}"\n')
    assert contents(other) == before
    obstacle.unlink()
    installed_into(tmp_path, "COMPAT=nvidia")
    assert sorted(os.listdir(tmp_path / PREFIX / "bin")) == sorted(OURS + INCUMBENTS)
    assert os.readlink(config) == "managed.toml"
    # What a kill between a copy and its rename leaves.
    (tmp_path / LIBRARY / "launcher.gpuruntime-new").write_text("")
    assert make("uninstall", tmp_path)[0] == 0
    del before[f"{PREFIX}/share/man"]
    assert contents(tmp_path) == before


def test_the_services_of_a_node_are_there_if_they_are_asked_for(tmp_path: Path) -> None:
    """With what they need, in a directory that the other programs do not import from.

    Without the incumbent's names there is no config: it would hide one that is looked for later.
    """
    installed_into(tmp_path, "NODE=1")
    assert sorted(os.listdir(tmp_path / PREFIX / "bin")) == sorted([*OURS, "gpu-node"])
    assert not (tmp_path / "etc").exists()
    assert (tmp_path / PREFIX / "share/man/man1/gpu-node-device-plugin.1").exists()
    assert (tmp_path / LIBRARY / "node" / "grpclib" / "__init__.py").exists()
    for name in ("gpu-node", "gpuruntime"):
        first, _, code = (tmp_path / PREFIX / "bin" / name).read_text().partition("\n")
        assert first.endswith("/venv/bin/python -ISB")
        code = code.replace('"/usr/local/', f'"{tmp_path}/usr/local/').replace("main()", "")
        code += "import gpunode.kubelet.registration\nmain()"
        command = [tmp_path / LIBRARY / "venv/bin/python", "-ISB", "-c", code, "--version"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) is (name == "gpu-node"), done.stderr
    assert "No module named 'grpclib'" in done.stderr
    assert make("uninstall", tmp_path)[0] == 0
    assert contents(tmp_path) == {}


def test_a_program_of_another_package_is_not_replaced(tmp_path: Path) -> None:
    """Nor is anything else done: half an installation is none."""
    path = tmp_path / PREFIX / "bin" / "nvidia-ctk"
    path.parent.mkdir(parents=True)
    path.write_text("the incumbent\n")
    before = contents(tmp_path)
    status, errors = make("install", tmp_path, "COMPAT=nvidia")
    assert status != 0
    assert f'install: "{path}" is there, and was not installed by us\nhint: ' in errors
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("PREFIX=usr/local", 'install: "usr/local" is no absolute path'),
        ('PREFIX=/usr/"x', 'install: "/usr/"x" has a character that'),
        ("PREFIX=/usr/a b", 'install: "/usr/a b" has a character that'),
        ("PREFIX=/usr/it's", 'install: "/usr/it\'s" has a character that'),
        ("PREFIX=/usr/../opt", 'install: "/usr/../opt" has "." or ".." in it'),
        ("DESTDIR=-x", 'install: DESTDIR="-x" looks like an option'),
        ("CC=/none/gcc", 'install: the compiler "/none/gcc" is not installed'),
        ("COMPAT=amd", 'install: COMPAT="amd" is unknown'),
        ("NODE=yes", 'install: NODE="yes" is unknown'),
        ("START_PYTHON=/bin/false", 'install: "/bin/false" is no Python 3.9 or newer'),
    ],
)
def test_what_cannot_be_is_refused(option: str, said: str, tmp_path: Path) -> None:
    """Before anything is built."""
    status, errors = make("install", tmp_path, option)
    assert status != 0
    assert errors.startswith(said)
    assert "\nhint: " in errors
    assert contents(tmp_path) == {}


def test_a_start_path_without_bytecode_is_not_installed(tmp_path: Path) -> None:
    """It would work, six times slower, and nobody would know why."""
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\ncase "$*" in *compileall*) exit 0 ;; esac\n'
                      'exec /usr/bin/python3 "$@"\n')  # fmt: skip
    python.chmod(0o755)
    status, errors = make("install", tmp_path / "root", f"START_PYTHON={python}")
    assert status != 0
    assert re.search(r"without bytecode: .*/gpuruntime/shim/main\.py", errors)
    assert "install: the start path is not complete\n" in errors
    assert not (tmp_path / "root").exists()


def test_pins_of_the_installation_are_those_of_the_tests() -> None:
    """What is tested is what is installed."""
    requirements = TREE / "requirements"
    blocks = re.split(r"(?m)^(?=\w)", (requirements / "runtime.txt").read_text())[1:]
    assert len(blocks) >= 4
    tested = (requirements / "dev.txt").read_text()
    for block in blocks:
        assert f"\n{block}" in tested
    pinned = {re.split("==", block)[0] for block in blocks}
    wanted = re.findall(r"(?m)^[\w-]+", (requirements / "runtime.in").read_text())
    assert set(wanted) <= pinned


@pytest.mark.system("make", "gcc", "runc", "bash")
def test_installed_programs_work(seen: dict[str, Any]) -> None:
    """From a prefix of their own, without our virtual environment."""
    ours = "gpuruntime, version 0.1.0\n"
    assert seen["version"] == [ours, f"NVIDIA Container Toolkit CLI version 0.1.0\n{ours}"]
    assert seen["nvidia-container-cli"].startswith("cli-version: 0.1.0\nlib-version: 0.1.0\n")
    assert seen["runtime version"].startswith("gpu-container-runtime version 0.1.0\n\nrunc ")
    assert 'NVIDIA_VISIBLE_DEVICES="1,3"' in seen["explain"]
    assert seen["completion"] == "generate\n"


@pytest.mark.system("make", "gcc", "runc", "bash")
def test_the_incumbents_names_have_its_defaults(seen: dict[str, Any]) -> None:
    """Runtime `nvidia` by its program, all files of the driver; ours by our own names."""
    assert '"nvidia": {' in seen["configure"]
    assert '"path": "nvidia-container-runtime"' in seen["configure"]
    assert '"gpuruntime": {' in seen["our configure"]
    assert '"path": "/srv/gpuruntime/bin/gpu-container-runtime"' in seen["our configure"]
    (capabilities,) = re.findall(r"(?m)^capabilities +(.*)$", seen["explain"])
    assert "graphics" in capabilities or capabilities.startswith("all")


@pytest.mark.system("make", "gcc", "runc", "bash")
def test_an_installed_runtime_starts_a_container(seen: dict[str, Any]) -> None:
    """By both names; with the machine's devices, and by a spec whose hook is the installed one."""
    for name in ("gpu-container-runtime", "nvidia-container-runtime", "spec"):
        came = seen["containers"][name]
        assert (came["status"], came["output"]) == (0, "ModifyDeviceFiles: 0\n"), name
    assert "/srv/gpuruntime/bin/gpu-cdi-hook" in seen["containers"]["hooks"]


@pytest.mark.system("make", "gcc", "runc", "bash")
def test_use_writes_nothing_and_uninstall_leaves_nothing(seen: dict[str, Any]) -> None:
    """Bytecode that Python writes by itself would be nobody's to remove."""
    assert seen["installed"] > 600
    assert seen["written by use"] == []
    assert seen["left"] == []
