# SPDX-License-Identifier: Apache-2.0
"""`make deb`: what is in the packages, and that they are the same each time.

That they can be installed, upgraded and removed is for `make test-install`: it needs clean roots.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import stat
import subprocess
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import releases
from effort import IS_FULL

TREE = Path(__file__).parents[2]
OURS, COMPAT, NODE = "gpuruntime", "gpuruntime-nvidia-compat", "gpu-node"
LIBRARY = "usr/lib/gpuruntime"
# Distribution → its module.
VENDORED = {"nvidia-ml-py": "pynvml.py", "tomlkit": "tomlkit/__init__.py"}
PROGRAMS = {
    OURS: ["gpu-cdi-hook", "gpu-container-runtime", "gpu-container-runtime-hook", "gpuruntime"],
    COMPAT: [
        *("nvidia-cdi-hook", "nvidia-container-cli", "nvidia-container-runtime"),
        *("nvidia-container-runtime-hook", "nvidia-container-runtime.cdi"),
        *("nvidia-container-runtime.legacy", "nvidia-container-toolkit", "nvidia-ctk"),
    ],
    NODE: ["gpu-node"],
}
# The incumbent's packages that have one of these programs, or are of no use without them.
INCUMBENTS = {
    *("nvidia-container-toolkit", "nvidia-container-toolkit-base"),
    *("nvidia-container-toolkit-operator-extensions", "nvidia-container-runtime"),
    *("nvidia-container-runtime-hook", "nvidia-docker2", "libnvidia-container-tools"),
}
pytestmark = pytest.mark.system("make", "gcc", "dpkg-deb")


def packages(place: Path) -> dict[str, Path]:
    """Return package → file, of those in *place*."""
    return {file.name.partition("_")[0]: file for file in place.glob("*.deb")}


def field(package: Path, name: str) -> str:
    """Return the field *name* of the control file of *package*."""
    command = ["dpkg-deb", "-f", str(package), name]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return package → file."""
    return packages(releases.of_run(tmp_path_factory))


@pytest.fixture(scope="module")
def unpacked(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return package → directory with its files, and its control files in DEBIAN."""
    places = {}
    for name, file in built.items():
        places[name] = tmp_path_factory.mktemp("unpacked") / name
        subprocess.run(["dpkg-deb", "-R", str(file), str(places[name])], check=True)
    return places


def files_of(place: Path) -> list[str]:
    """Return the paths of all that is not a directory below *place*, without control files."""
    found = [str(path.relative_to(place)) for path in place.rglob("*") if not path.is_dir()]
    return sorted(path for path in found if not path.startswith("DEBIAN/"))


def test_each_name_is_in_one_package(unpacked: dict[str, Path]) -> None:
    """The incumbent's names need its packages gone; ours do not."""
    assert sorted(unpacked) == [NODE, OURS, COMPAT]
    for package, names in PROGRAMS.items():
        assert sorted(os.listdir(unpacked[package] / "usr/bin")) == names
    paths = [path for root in unpacked.values() for path in files_of(root)]
    assert len(paths) == len(set(paths))
    for name in PROGRAMS[COMPAT]:
        target = unpacked[COMPAT] / "usr/bin" / os.readlink(unpacked[COMPAT] / "usr/bin" / name)
        relative = os.path.normpath(target.relative_to(unpacked[COMPAT]))
        assert (unpacked[OURS] / relative).is_file(), relative


def test_files_are_roots_and_nobody_elses_to_write(built: dict[str, Path]) -> None:
    """All of it runs as root; and nothing names the place where it was built."""
    for file in built.values():
        command = ["dpkg-deb", "-c", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        lines = done.stdout.splitlines()
        assert len(lines) > 30
        for line in lines:
            mode, owner, *_ = line.split()
            assert owner == "root/root", line
            assert mode in ("drwxr-xr-x", "-rwxr-xr-x", "-rw-r--r--", "lrwxrwxrwx"), line


def test_no_file_names_the_place_where_it_was_built(unpacked: dict[str, Path]) -> None:
    """It would be a path that users do not have."""
    place = os.fsencode(TREE)
    for root in unpacked.values():
        for path in root.rglob("*"):
            if path.is_file() and not path.is_symlink():
                assert place not in path.read_bytes(), path


def test_bytecode_is_left_to_the_installation(unpacked: dict[str, Path]) -> None:
    """Which Python there is then, only then is known."""
    paths = files_of(unpacked[OURS])
    assert [path for path in paths if "python3." in path or path.endswith(".pyc")] == []
    ours = [
        path for name in ("cdi", "gpuruntime", "hooks") for path in TREE.glob(f"{name}/**/*.py")
    ]
    there = {path for path in paths if path.endswith(".py") and "site-packages" not in path}
    assert there == {f"{LIBRARY}/{path.relative_to(TREE)}" for path in ours}
    link = unpacked[OURS] / LIBRARY / "venv/bin/python"
    assert os.path.normpath(f"/{LIBRARY}/venv/bin/{os.readlink(link)}") == "/usr/bin/python3"
    assert (
        "interest-noawait /usr/bin/python3"
        in (unpacked[OURS] / "DEBIAN/triggers").read_text().splitlines()
    )


def test_units_of_the_scripts_are_those_of_the_package(unpacked: dict[str, Path]) -> None:
    """A unit that is not in the list would never be enabled, or stay enabled for ever."""
    units = unpacked[OURS] / "usr/lib/systemd/system"
    wanted = {path.name for path in units.iterdir() if "[Install]" in path.read_text()}
    assert len(wanted) >= 4
    for script in ("postinst", "prerm", "postrm"):
        text = (unpacked[OURS] / "DEBIAN" / script).read_text()
        (listed,) = re.findall(r"(?m)^units='(.*)'$", text)
        assert set(listed.split()) == wanted, script


def test_no_config_file_is_dpkgs(unpacked: dict[str, Path]) -> None:
    """It would ask about the incumbent's at each switch; without a terminal that is a failure."""
    for root in unpacked.values():
        assert not (root / "etc").exists()
        assert not (root / "DEBIAN/conffiles").exists()
    assert (unpacked[COMPAT] / LIBRARY / "config.compat.toml").is_file()


@pytest.mark.system("make", "gcc", "dpkg-deb", "sh")
def test_scripts_are_shell(unpacked: dict[str, Path]) -> None:
    """A syntax error in one of them makes a package that cannot even be removed."""
    scripts = [path for root in unpacked.values() for path in (root / "DEBIAN").glob("*[mt]")]
    assert len(scripts) == 8
    for script in scripts:
        assert stat.S_IMODE(script.stat().st_mode) == 0o755
        done = subprocess.run(["sh", "-n", str(script)], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b""), script


def test_dependencies_are_debians_or_brought_along(
    built: dict[str, Path], unpacked: dict[str, Path]
) -> None:
    """One list, of pyproject.toml; what Debian 12 lacks or has too old is brought along."""
    project = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    wanted = dict(re.split(">=", text) for text in project["dependencies"])
    site = unpacked[OURS] / LIBRARY / "venv/lib/python3/site-packages"
    for name, module in VENDORED.items():
        folder = name.replace("-", "_")
        (info,) = site.glob(f"{folder}-*.dist-info")
        brought = info.name.removeprefix(f"{folder}-").removesuffix(".dist-info")
        assert numbers(brought) >= numbers(wanted.pop(name))
        assert (site / module).is_file()
    known = {"gpuruntime.pth", *(module.partition("/")[0] for module in VENDORED.values())}
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == known
    renamed = {"pyyaml": "yaml"}
    expected = {f"python3-{renamed.get(k, k)} (>= {v})" for k, v in wanted.items()}
    expected.add(f"python3 ({project['requires-python'].replace('>=', '>= ')})")
    assert set(field(built[OURS], "Depends").split(", ")) == expected


def test_the_node_services_bring_along_what_they_need(
    built: dict[str, Path], unpacked: dict[str, Path]
) -> None:
    """And the runtime's package has none of it: hooks and engines work without gRPC."""
    project = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    place = unpacked[NODE] / LIBRARY / "node"
    for text in project["optional-dependencies"]["node"]:
        name, least = text.split(">=")
        (info,) = place.glob(f"{name.replace('-', '_')}-*.dist-info")
        assert numbers(info.name.split("-")[1].removesuffix(".dist")) >= numbers(least)
    brought = {path.name for path in place.iterdir()}
    assert not brought & {"click", "jsonschema", "yaml", "pynvml.py", "tomlkit"}
    # Documents may be about them.
    code = [Path(path).parts for path in files_of(unpacked[OURS]) if path.startswith(LIBRARY)]
    assert len(code) > 100
    assert not {part for parts in code for part in parts} & {"gpunode", *brought}
    version = field(built[OURS], "Version")
    assert field(built[NODE], "Depends").split(", ")[0] == f"{OURS} (= {version})"
    modules = {path for path in files_of(unpacked[NODE]) if "/gpunode/" in path}
    sources = [path.relative_to(TREE) for path in TREE.glob("gpunode/**/*.py")]
    sources += [path.relative_to(TREE) for path in TREE.glob("gpunode/**/*.json")]
    assert modules == {f"{LIBRARY}/{path}" for path in sources}


def test_the_node_program_runs_with_the_packages_alone(
    built: dict[str, Path], unpacked: dict[str, Path]
) -> None:
    """By the distribution's Python; for its modules stand those that `make install` brings."""
    script = (unpacked[NODE] / "usr/bin/gpu-node").read_text()
    first, _, code = script.partition("\n")
    assert first == "#!/usr/bin/python3 -ISB"
    for package, name in ((NODE, "node"), (OURS, "venv/lib/python3/site-packages")):
        code = code.replace(f'"/{LIBRARY}/{name}"', f'"{unpacked[package] / LIBRARY / name}"')
    both = [str(unpacked[package] / LIBRARY) for package in (OURS, NODE)]
    # Installed, they are one directory; the package gpunode is in the second.
    code = code.replace(f'"/{LIBRARY}"', f'"{both[0]}", "{both[1]}"')
    (version,) = re.findall(r"python3 \(>= ([0-9.]+)\)", field(built[NODE], "Depends"))
    (brought, *_) = sorted(
        TREE.glob(f"build/install/python{version}-*-runtime-*"), key=os.path.getmtime, reverse=True
    )
    code = code.replace('"/usr/lib/python3/dist-packages"', f'"{brought}"')
    code = code.replace("main()", "import gpunode.kubelet.registration\nmain()")
    done = subprocess.run(
        ["/usr/bin/python3", "-ISB", "-c", code, "device-plugin", "--help"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "--kubelet-socket" in done.stdout


def numbers(version: str) -> list[int]:
    """Return the numbers of *version*."""
    return [int(word) for word in version.split(".")]


def test_compat_takes_the_place_of_the_incumbents_packages(built: dict[str, Path]) -> None:
    """They go, and what depends on them stays: also on a version."""
    package = built[COMPAT]
    assert set(field(package, "Conflicts").split(", ")) == INCUMBENTS
    assert field(package, "Replaces") == field(package, "Conflicts")
    provided = field(package, "Provides").split(", ")
    assert {text.split()[0] for text in provided} == INCUMBENTS
    assert "nvidia-container-toolkit (= 1.20.0-1)" in provided
    assert field(package, "Depends") == f"{OURS} (= {field(built[OURS], 'Version')})"
    assert field(package, "Architecture") == "all"


@pytest.mark.skipif(not IS_FULL, reason="`make test-all` builds twice")
def test_two_builds_at_once_are_both_whole(unpacked: dict[str, Path]) -> None:
    """They wait for each other: files of one in a package of the other would be in no list."""
    with ThreadPoolExecutor() as pool:
        done = list(
            pool.map(
                lambda version: releases.make("deb", f"DEB_VERSION={version}", "NODE=0"),
                ("2-1", "3-1"),
            )
        )
    assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    files = list((TREE / "build/deb").glob("*.deb"))
    assert len({field(file, "Version") for file in files}) == 1
    assert {field(file, "Package") for file in files} == {OURS, COMPAT}
    (compat,) = (file for file in files if field(file, "Package") == COMPAT)
    listed = subprocess.run(
        ["dpkg-deb", "-c", str(compat)], capture_output=True, text=True, check=True
    )
    names = [line.split()[5] for line in listed.stdout.splitlines() if not line.startswith("d")]
    assert sorted(name.removeprefix("./") for name in names) == files_of(unpacked[COMPAT])


def test_a_build_waits_for_another(tmp_path: Path) -> None:
    """It leaves the files of the other alone until then."""
    lock = TREE / "build/deb.lock"
    others = TREE / "build/deb/work/file"
    others.parent.mkdir(parents=True, exist_ok=True)
    others.write_text("")
    # A control: it is the lock that keeps the build from its first step.
    for is_held in (True, False):
        with lock.open("w") as stream, (tmp_path / "errors").open("w") as errors:
            if is_held:
                fcntl.flock(stream, fcntl.LOCK_EX)
            build = releases.start("deb", stderr=errors)
            try:
                end = time.monotonic() + 60
                while build.poll() is None and others.exists() and not is_awaited(lock):
                    assert time.monotonic() < end
                    time.sleep(0.02)
                assert (build.poll(), others.exists()) == (None, is_held)
            finally:
                os.killpg(build.pid, signal.SIGKILL)
                build.wait()


def is_awaited(lock: Path) -> bool:
    """Return whether a process waits for *lock*."""
    inode = f":{lock.stat().st_ino} "
    lines = Path("/proc/locks").read_text().splitlines()
    return any("-> FLOCK" in line and inode in line for line in lines)


@pytest.mark.system("make", "gcc", "dpkg-deb", "lintian")
def test_lintian_finds_nothing(
    built: dict[str, Path], unpacked: dict[str, Path], tmp_path: Path
) -> None:
    """Neither errors nor warnings; what is overridden says why in packaging/debian."""
    # The control, in the same run: without our overrides it finds the launcher. That package has
    # nothing else, because lintian reads every file.
    bare = tmp_path / "bare"
    for path in ("DEBIAN/control", f"{LIBRARY}/launcher"):
        (bare / path).parent.mkdir(parents=True)
        shutil.copy(unpacked[OURS] / path, bare / path)
    control = bare / "DEBIAN/control"
    control.write_text(control.read_text().replace(f"Package: {OURS}\n", "Package: bare\n"))
    file = tmp_path / built[OURS].name.replace(OURS, "bare")
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", bare, file],
                   stdout=subprocess.DEVNULL, check=True)  # fmt: skip
    command = ["lintian", "--allow-root", "--no-cfg", "--fail-on", "error,warning", file]
    done = subprocess.run([*command, *built.values()], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    of_bare = re.findall(r"(?m)^[EW]: bare: (\S+)", done.stdout)
    assert "statically-linked-binary" in of_bare
    assert len(done.stdout.splitlines()) == len(of_bare), done.stdout


@pytest.mark.system("make", "gcc", "dpkg-deb", "aarch64-linux-gnu-gcc")
def test_another_architecture_by_its_compiler(
    built: dict[str, Path], unpacked: dict[str, Path], tmp_path: Path
) -> None:
    """Only the launcher is of an architecture, and the environment shows in no file."""
    with releases.foreign_mask():
        done = releases.make("deb", "CC=aarch64-linux-gnu-gcc", **releases.FOREIGN)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    other = packages(TREE / "build" / "deb")
    assert field(other[OURS], "Architecture") == "arm64"
    subprocess.run(["dpkg-deb", "-x", str(other[OURS]), str(tmp_path / "root")], check=True)
    header = (tmp_path / "root" / LIBRARY / "launcher").read_bytes()[:20]
    assert int.from_bytes(header[18:20], "little") == 183  # EM_AARCH64
    assert other[COMPAT].read_bytes() == built[COMPAT].read_bytes()
    # Everything else is the same, to the byte and the mode.
    subprocess.run(["dpkg-deb", "-e", str(other[OURS]), str(tmp_path / "root/DEBIAN")], check=True)
    assert files_of(tmp_path / "root") == files_of(unpacked[OURS])
    for path in files_of(tmp_path / "root"):
        ours, theirs = tmp_path / "root" / path, unpacked[OURS] / path
        assert ours.lstat().st_mode == theirs.lstat().st_mode, path
        if not ours.is_symlink() and path != f"{LIBRARY}/launcher":
            assert ours.read_bytes() == theirs.read_bytes(), path
    for name in ("Depends", "Conflicts", "Version"):
        assert field(other[OURS], name) == field(built[OURS], name)


def test_what_cannot_be_is_refused_before_anything_is_removed(tmp_path: Path) -> None:
    """One line about what is wrong, one about what to do."""
    kept = TREE / "build/deb/kept.deb"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text("")
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\necho riscv64-linux-gnu\n")
    compiler.chmod(0o755)
    cases = {
        "DEB_VERSION=one": 'deb: DEB_VERSION="one" is not a Debian version',
        "DEB_VERSION=1|x": 'deb: DEB_VERSION="1|x" is not a Debian version',
        f"CC={compiler}": "deb: the launcher is not for riscv64-linux-gnu",
        "CC=/none/gcc": 'deb: the compiler "/none/gcc" is not installed',
        "NODE=2": 'deb: NODE="2" is unknown',
    }
    try:
        for option, said in cases.items():
            done = releases.make("deb", option)
            assert done.returncode != 0
            assert done.stderr.startswith(said)
            assert "\nhint: " in done.stderr
            assert kept.exists()
    finally:
        kept.unlink()
