# SPDX-License-Identifier: Apache-2.0
"""Packages in clean roots: install, use, upgrade, remove, purge; for `make test-install`.

A root is what mmdebstrap makes of a suite, from where this machine fetches its own packages. It is
kept below build/test-install together with the packages that ours depend on, so that afterwards
nothing is fetched: apt installs without pip and without a network. Each root is used on a tmpfs in
mount and PID namespaces of its own: whatever happens, the kernel takes them away.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import fetch_driver
import namespace
from scenarios import transcripts

TREE = Path(__file__).resolve().parents[2]
BUILD = TREE / "build" / "test-install"
PACKAGES = BUILD / "packages"
SUITES = {"bookworm": "Debian 12", "trixie": "Debian 13"}
# Debian 12 with what ours depend on, and the packages that make Debian 13 of it.
UPGRADE = "upgrade"
ROOTS = {**SUITES, UPGRADE: "Debian 12 to 13"}
APT = 'APT_CONFIG="$MMDEBSTRAP_APT_CONFIG" apt-get -qq'
# What else is used there: a runtime, and a userland for the container.
WITH = ("runc", "busybox-static")
COMPAT = "gpuruntime-nvidia-compat"
LIBRARY = "usr/lib/gpuruntime"
# What tells users how to install the packages.
PAGES = ("docs/install.md", "README.md")
# And how, in the directory that has them.
NODE_PAGE = "docs/guides/node.md"
# Where the roots have this checkout.
CHECKOUT = "srv/checkout"
CLONE_NEWNET = 0x40000000
CONFIG = "etc/nvidia-container-runtime/config.toml"
WANTED_BY = "etc/systemd/system/multi-user.target.wants"
DEVICES = ["nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools", "nvidia1", "nvidia3", "nvidiactl"]
NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9)}
ENVIRONMENT = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
}


def main() -> int:
    """Test in each root and return the exit status."""
    if len(sys.argv) == 3 and sys.argv[1] == "--inside":
        root = Root(sys.argv[2])
        upgrade_python(root) if sys.argv[2] == UPGRADE else test(root)
        return 0
    if os.geteuid() != 0:
        fail("clean roots need root", "run: sudo make test-install")
    if not shutil.which("mmdebstrap"):
        fail('"mmdebstrap" is not installed', "run: make setup")
    build_packages()
    skipped = []
    for root, name in ROOTS.items():
        try:
            make_base(root)
        except fetch_driver.FetchError as error:
            skipped.append(name)
            print(f"test-install: SKIPPED {name}: there is no clean root\n{error}", flush=True)
            continue
        inside = [sys.executable, __file__, "--inside", root]
        isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        if subprocess.run([*isolated, *inside], check=False).returncode != 0:
            return 1
    remaining = mounts_below(BUILD)
    if remaining:
        fail(f"still mounted: {', '.join(remaining)}", "look at what the lines above have done")
    done = [name for name in ROOTS.values() if name not in skipped]
    print(f"test-install: {'ok: ' + ', '.join(done) if done else 'nothing could be tested'}"
          + (f"; SKIPPED: {', '.join(skipped)}" if skipped else ""))  # fmt: skip
    return 0 if done else 1


def fail(message: str, hint: str) -> NoReturn:
    """End with one line about what was wrong, and one thing to do."""
    sys.exit(f"test-install: {message}\nhint: {hint}")


def mounts_below(directory: Path) -> list[str]:
    """Return the mount points below *directory*; those elsewhere are of other programs."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = (line.split()[4] for line in lines)
    return [point for point in points if point.startswith(f"{directory}/")]


# ---- what is made once ----


def build_packages(*more: str) -> None:
    """Build the packages, and those of a newer version, with *more* variables of `make deb`."""
    shutil.rmtree(PACKAGES, ignore_errors=True)
    built = TREE / "build" / "deb"
    for place, version in (("new", "9.0-1"), ("old", "")):
        done = subprocess.run(
            ["make", "--no-print-directory", "-C", str(TREE), "deb", f"DEB_VERSION={version}",
             *more],
            text=True, capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            fail(f"the packages could not be built\n{done.stderr}", "run: make deb")
        shutil.copytree(built, PACKAGES / place)


def dependencies() -> list[str]:
    """Return the names of the packages that ours depend on and recommend, and of those in WITH."""
    names = []
    for package in (PACKAGES / "old").glob("gpuruntime*.deb"):
        for field in ("Depends", "Recommends"):
            text = output("dpkg-deb", "-f", str(package), field)
            names += [word.split()[0] for word in text.split(",") if word.strip()]
    return sorted({*names, *WITH} - {"gpuruntime"})


def base(root: str) -> Path:
    """Return the path of the root of that name, of which there is one for a list of packages."""
    digest = hashlib.sha256(" ".join(dependencies()).encode()).hexdigest()[:12]
    return BUILD / f"{root}-{digest}.tar"


def make_base(root: str) -> None:
    """Make the root of that name, unless it is there; raise FetchError if it cannot be made."""
    path = base(root)
    if path.exists():
        return
    print(f"test-install: making a root of {ROOTS[root]}", flush=True)
    # How this machine reaches the archive.
    reach = [
        f"--aptopt={line}"
        for line in output("apt-config", "dump", "Acquire").splitlines()
        if re.match(r'Acquire::https?::.*Proxy.* ".+"', line)
    ]
    packages = dependencies()
    if root == UPGRADE:
        suite, newer = SUITES
        place = '"$1"/etc/apt/sources.list.d'
        more = [
            f"--include={','.join(packages)}",
            f'--customize-hook=rm -f {place}/* && printf %s "$NEWER" >{place}/newer.sources',
            f"--customize-hook={APT} update",
            f"--customize-hook={APT} --download-only dist-upgrade",
        ]
    else:
        suite = newer = root
        more = [f"--customize-hook={APT} --download-only install {' '.join(packages)}"]
    fresh = path.with_suffix(".new")
    done = subprocess.run(
        ["unshare", "--mount", "mmdebstrap", "--mode=root", "--variant=apt",
         "--format=tar", "--skip=cleanup/apt", *reach, *more, suite, str(fresh), "-"],
        env={**os.environ, "NEWER": sources(newer)},
        input=sources(suite), text=True, capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        fresh.unlink(missing_ok=True)
        lines = done.stderr.strip().splitlines()[-8:]
        raise fetch_driver.FetchError("\n".join(lines), "check the network and try again")
    for old in BUILD.glob(f"{root}-*.tar"):
        old.unlink()
    fresh.rename(path)


def sources(suite: str) -> str:
    """Return the entry of apt's sources for *suite*, of where this machine's own packages are."""
    source = fetch_driver.machine_source()
    signed = f"Signed-By: {source.signed_by}\n" if source.signed_by else ""
    return f"Types: deb\nURIs: {source.uris}\nSuites: {suite}\nComponents: main\n{signed}"


def output(*command: str) -> str:
    """Return what *command* prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# ---- the root ----


class Root:
    """A clean root on a tmpfs that only this process and its children see."""

    def __init__(self, name: str) -> None:
        self.name = ROOTS[name]
        self.top = BUILD / "root"
        self.top.mkdir(exist_ok=True)
        self._mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", self.top)
        output("tar", "-xf", str(base(name)), "-C", str(self.top))
        self._mount("-t", "proc", "proc", self.top / "proc")
        self._mount("--rbind", "/sys", self.top / "sys")
        self._make_dev(self.top / "dev")
        # Nobody is there to be asked; and recommended packages were not fetched.
        self.path("etc/apt/apt.conf.d/99test").write_text(
            'quiet "2";\nAPT::Get::Assume-Yes "true";\nAPT::Install-Recommends "false";\n'
        )
        # Not with what is mounted below it: that is this root.
        checkout = self.top / CHECKOUT
        checkout.mkdir(parents=True)
        self._mount("--bind", TREE, checkout)

    def _mount(self, *words: object) -> None:
        output("mount", *map(str, words))

    def _make_dev(self, dev: Path) -> None:
        self._mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", dev)
        for name, (major, minor) in NODES.items():
            os.mknod(dev / name, 0o020666, os.makedev(major, minor))
            os.chmod(dev / name, 0o666)
        for name in ("pts", "shm"):
            (dev / name).mkdir()
        self._mount("-t", "devpts", "-o", "newinstance,ptmxmode=0666", "devpts", dev / "pts")
        self._mount("-t", "tmpfs", "tmpfs", dev / "shm")
        for name, target in (("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd")):
            (dev / name).symlink_to(target)

    def _enter(self) -> None:
        """Have this process see nothing but the root, and no network.

        Not by chroot: who enters its mount namespace, as hooks do, is at the root of that.
        """
        namespace.unshare(namespace.CLONE_NEWNS | CLONE_NEWNET)
        os.chdir(self.top)
        if ctypes.CDLL(None, use_errno=True).pivot_root(b".", b"mnt") != 0:
            raise OSError(ctypes.get_errno(), "pivot_root")
        namespace.unmount("/mnt", namespace.MNT_DETACH)
        os.chdir("/")

    def run(self, *command: object, fails: bool = False, **variables: str) -> str:
        """Run *command* in the root, without a network, and return its output and errors."""
        done = subprocess.run(
            list(map(str, command)), preexec_fn=self._enter,
            env={**ENVIRONMENT, **variables}, text=True, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if (done.returncode != 0) is not fails:
            what = f"{self.name}: {' '.join(map(str, command))}: status {done.returncode}"
            sys.exit(f"test-install: {what}\n{done.stdout[-3000:]}")
        return done.stdout

    def apt(self, action: str, *words: object) -> str:
        """Have apt do *action*; whatever it needs was fetched with the root."""
        return self.run("apt-get", action, *words)

    def path(self, name: str) -> Path:
        """Return where this machine has the root's *name*."""
        return self.top / name

    def names(self) -> list[str]:
        """Return the paths of all that has our name or the incumbent's."""
        paths = []
        for directory, names, others in os.walk(self.top):
            place = os.path.relpath(directory, self.top)
            names[:] = [] if place in ("proc", "sys", "dev", CHECKOUT) else names
            paths += [os.path.normpath(f"{place}/{name}") for name in (*names, *others)]
        ours = (path for path in paths if re.search("gpuruntime|gpu-c|nvidia", path))
        return sorted(path for path in ours if not path.startswith(f"{CHECKOUT}/"))

    def says(self, line: str) -> None:
        """Tell what was seen."""
        print(f"test-install: {self.name}: {line}", flush=True)


def is_default(root: Root) -> bool:
    """Return whether the config file is the one that we make."""
    return (
        root.path(CONFIG).read_bytes() == root.path(f"{LIBRARY}/config.compat.toml").read_bytes()
    )


def compiled(root: Root) -> tuple[int, set[str]]:
    """Return how many modules there are, and the names of Pythons that all are compiled for."""
    modules = [p for p in root.path(LIBRARY).rglob("*.py") if "python3." not in str(p)]
    tags = []
    for module in modules:
        files = (module.parent / "__pycache__").glob(f"{module.stem}.*.pyc")
        # By a hash that is never checked: PEP 552.
        good = [file for file in files if file.read_bytes()[4:8] == b"\1\0\0\0"]
        tags.append({file.name.split(".")[-2] for file in good})
    return len(modules), set.intersection(*tags)


def packages_of(version: str) -> list[str]:
    """Return the files in the root of our packages of *version*: "old" or "new".

    Not gpu-node, which is for the Python of the machine that builds it alone.
    """
    files = sorted((PACKAGES / version).glob("gpuruntime*.deb"))
    return [f"/{CHECKOUT}/{file.relative_to(TREE)}" for file in files]


def documented(*pages: str, command: str = "apt install") -> str:
    """Return the one command of the *pages* that begins with *command*."""
    (line,) = {
        step
        for page in pages
        for transcript in transcripts.of_page(TREE / page)
        for step, _ in transcript.steps
        if step.startswith(command)
    }
    return line


# ---- what is tested ----


def test(root: Root) -> None:
    """Do all of it, in one root."""
    assert root.names() == []
    install(root)
    use(root)
    read_pages(root)
    trigger(root)
    upgrade(root)
    remove(root)
    switch(root)
    switch_back(root)


def install(root: Root) -> None:
    """Install; see that all is in place, and compiled for this root's Python."""
    root.apt("install", *WITH)
    root.run("sh", "-ec", f"cd /{CHECKOUT}; {documented(*PAGES)}")
    root.run("python3", "-c", "import pip", fails=True)
    show = "import sys; print(sys.implementation.cache_tag)"
    python = root.run("/usr/bin/python3", "-c", show).strip()
    modules, tags = compiled(root)
    assert modules > 100
    assert tags == {python}, tags
    assert not root.run("dpkg", "--verify", "gpuruntime", COMPAT)
    units = [path.name for path in root.path(WANTED_BY).iterdir() if "gpuruntime" in path.name]
    assert len(units) == 3, units
    assert is_default(root)
    root.says(f"installed by apt without network and pip; {modules} modules for {python}")


def use(root: Root) -> None:
    """Ask the programs; start containers on a simulated GPU host; see that nothing was written."""
    before = root.names()
    for name in ("gpuruntime", "nvidia-ctk", "nvidia-container-cli", "gpu-container-runtime"):
        assert "version" in root.run(name, "--version"), name
    tests = f"/{CHECKOUT}/tests"
    text = root.run("python3", "-B", f"{tests}/simhost/simhost.py", "run", "--",
                    "python3", "-B", f"{tests}/scenarios/packaged.py")  # fmt: skip
    seen = json.loads(text.splitlines()[-1])
    for name, lines in seen["containers"].items():
        assert lines == [*DEVICES, "ModifyDeviceFiles: 0"], (name, lines)
    assert 'compiled for "/usr/bin/python3"' in seen["doctor"], seen["doctor"]
    assert "modes.jit-cdi.driver-capabilities" in seen["config"], seen["config"]
    assert seen["failed commands"] == {}, seen["failed commands"]
    assert seen["completion"] == "generate\n", seen["completion"]
    written = set(root.names()) ^ set(before)
    assert all(path.startswith("run/gpuruntime") for path in written), written
    names = ", ".join(seen["containers"])
    root.says(f"containers by {names}: {' '.join(DEVICES)}")


def read_pages(root: Root) -> None:
    """Run the transcripts of the documents; their outputs are those of the packages."""
    host = ("python3", "-B", f"/{CHECKOUT}/tests/simhost/simhost.py", "run")
    program = ("python3", "-B", f"/{CHECKOUT}/tests/scenarios/transcripts.py")
    count = 0
    for name, setting in transcripts.SETTINGS.items():
        # What needs an engine or a compiler is made by tests/system/test_transcripts.py.
        if setting.needs:
            continue
        text = root.run(*host, *setting.options, "--", *program, name, INSTALLED="1")
        outputs = json.loads(text.splitlines()[-1])
        different = transcripts.differences(setting, outputs)
        assert not different, "\n".join(different)
        count += len(outputs)
    root.says(f"{count} transcripts of the documents show what the packages print")


def trigger(root: Root) -> None:
    """Another python3-minimal comes: all is compiled again, and what is older is gone."""
    stale = root.path(f"{LIBRARY}/hooks/__pycache__/entry.cpython-38.pyc")
    stale.write_text("")
    (root.path(f"{LIBRARY}/venv/lib/python3.8")).symlink_to("python3")
    (package,) = root.path("var/cache/apt/archives").glob("python3-minimal_*.deb")
    root.run("dpkg", "-i", f"/var/cache/apt/archives/{package.name}")
    assert not stale.exists()
    assert not root.path(f"{LIBRARY}/venv/lib/python3.8").is_symlink()
    assert len(compiled(root)[1]) == 1
    root.says("python3-minimal installed again: the trigger compiled the modules")


def upgrade(root: Root) -> None:
    """Upgrade: a config file that was changed and a unit that was disabled stay so."""
    again = (f"/var/lib/dpkg/info/{COMPAT}.postinst", "configure", "0.1.0-1")
    root.path(CONFIG).write_text("# the default of an older version\n")
    shutil.copy(root.path(CONFIG), root.path("var/lib/gpuruntime/config.compat.toml"))
    root.run(*again)
    assert is_default(root)
    root.path(CONFIG).unlink()
    root.run(*again)
    assert not root.path(CONFIG).exists()
    # A link is the user's, also if it leads to what we have made.
    managed = shutil.copy(root.path("var/lib/gpuruntime/config.compat.toml"), root.path("managed"))
    root.path(CONFIG).symlink_to("/managed")
    root.run(*again)
    assert root.path(CONFIG).is_symlink()
    root.path(CONFIG).unlink()
    managed.unlink()
    root.path(CONFIG).write_text("# mine\n")
    timer = root.path("etc/systemd/system/timers.target.wants/gpuruntime-cdi-refresh.timer")
    timer.unlink()
    root.apt("install", *packages_of("new"))
    assert root.run("dpkg-query", "-W", "-f", "${Version}", COMPAT) == "9.0-1"
    assert root.path(CONFIG).read_text() == "# mine\n"
    assert not timer.is_symlink()
    assert len(compiled(root)[1]) == 1
    root.says("upgraded: the changed config and the disabled unit are as they were")


def remove(root: Root) -> None:
    """Remove: configuration stays. Purge: nothing stays."""
    mine = [root.path(CONFIG), root.path("etc/gpuruntime/config.toml")]
    specs = [root.path("run/cdi/nvidia.yaml"), root.path("run/cdi/vendor.yaml")]
    for path in (mine[1], *specs):
        path.parent.mkdir(exist_ok=True)
    mine[1].write_text("# mine\n")
    for path in specs:
        path.write_text("path: /usr/bin/gpu-cdi-hook\n")
    root.apt("remove", "gpuruntime", COMPAT)
    assert [path.read_text() for path in mine] == ["# mine\n"] * 2
    # The spec that our unit writes names a hook that is gone. No other one is ours to remove.
    assert [path.exists() for path in specs] == [False, True]
    kept = [path for path in root.names() if not path.startswith(("etc/", "var/lib/"))]
    assert kept == []
    root.run("sh", "-ec", documented(NODE_PAGE, command="apt purge"))
    assert root.names() == []
    root.says("removed: configuration stayed; purged: nothing is left")


def upgrade_python(root: Root) -> None:
    """Debian 12 becomes Debian 13, and its Python another one."""
    directory = f"/{CHECKOUT}/{(PACKAGES / 'old').relative_to(TREE)}"
    root.run("sh", "-ec", f"cd {directory}; {documented(NODE_PAGE)}")
    assert compiled(root)[1] == {"cpython-311"}
    root.apt("dist-upgrade")
    assert compiled(root)[1] == {"cpython-313"}
    assert [path.name for path in root.path(f"{LIBRARY}/venv/lib").glob("python3.*")] == [
        "python3.13"
    ]
    root.says("upgraded with the packages in place: the trigger compiled for cpython-313")
    use(root)


def switch(root: Root) -> None:
    """Come from the incumbent: its packages go, what depends on them and its config file stay."""
    theirs = root.path("theirs")
    config = "# the incumbent's\n"
    files = {"usr/bin/nvidia-ctk": "", "usr/bin/nvidia-container-runtime": "", CONFIG: config}
    package(theirs / "base", "nvidia-container-toolkit-base", "", files)
    depends = "Depends: nvidia-container-toolkit-base (= 1.17.8-1)\n"
    files = {"usr/bin/nvidia-container-runtime-hook": ""}
    package(theirs / "toolkit", "nvidia-container-toolkit", depends, files)
    package(theirs / "other", "other", "Depends: nvidia-container-toolkit (>= 1.14.0)\n", {})
    root.run("dpkg", "-i", *(f"/theirs/{name}.deb" for name in ("base", "toolkit", "other")))
    root.path(CONFIG).write_text(f"{config}# edited\n")
    root.apt("install", *packages_of("old"))
    states = root.run("dpkg-query", "-W", "-f", "${Package} ${db:Status-Abbrev}\n")
    assert "other ii" in states
    assert "nvidia-container-toolkit ii" not in states
    assert "nvidia-container-toolkit-base ii" not in states
    assert root.path(CONFIG).read_text() == f"{config}# edited\n"
    assert os.readlink(root.path("usr/bin/nvidia-ctk")) == "../lib/gpuruntime/launcher"
    root.apt("purge", "other", COMPAT, "gpuruntime")
    assert root.path(CONFIG).read_text() == f"{config}# edited\n"
    root.says("in the incumbent's place: its config file stayed, and what depends on it")


def switch_back(root: Root) -> None:
    """Go back to the incumbent, purge what is left of ours: its config file stays."""
    root.apt("purge", "nvidia-container-toolkit-base")
    root.apt("install", *packages_of("old"))
    assert is_default(root)
    root.apt("remove", COMPAT)
    root.run("dpkg", "--force-confnew", "-i", "/theirs/base.deb")
    root.apt("purge", COMPAT, "gpuruntime")
    assert root.path(CONFIG).read_text() == "# the incumbent's\n"
    assert not root.run("dpkg", "--verify", "nvidia-container-toolkit-base")
    root.says("back to the incumbent: its config file stayed, after a purge of ours too")


def package(place: Path, name: str, more: str, files: dict[str, str]) -> None:
    """Make the package PLACE.deb."""
    for path, text in files.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)
    (place / "DEBIAN").mkdir(parents=True)
    (place / "DEBIAN/control").write_text(
        f"Package: {name}\nVersion: 1.17.8-1\nArchitecture: all\nMaintainer: none <a@b.invalid>\n"
        f"{more}Description: stands in for {name}\n"
    )
    conffiles = [f"/{path}\n" for path in files if path.startswith("etc/")]
    if conffiles:
        (place / "DEBIAN/conffiles").write_text("".join(conffiles))
    output("dpkg-deb", "--root-owner-group", "-b", str(place), f"{place}.deb")


if __name__ == "__main__":
    sys.exit(main())
