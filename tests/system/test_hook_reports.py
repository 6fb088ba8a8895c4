# SPDX-License-Identifier: Apache-2.0
"""Reports of faults in hooks and in the configuration of engines, each built as its input.

The real programs, on bundles and on files of engines in a directory of the test's own.
`docs/reference/bug-reports.md` has a row for each, with the line that the test prints as observed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from driver_roots import elf
from shim_host import PROGRAM, TREE, ShimHost, asking

from gpuruntime.formats import ldcache_merge

HOOK = str(TREE / ".venv" / "bin" / "gpu-cdi-hook")
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
LIBRARY = "--library=libnv.so.1::/opt/nv/libnv.so.550.1::x86-64"
COMPAT = "etc/ld.so.conf.d/00-compat-gpuruntime.conf"
CRI = "io.containerd.grpc.v1.cri"

pytestmark = pytest.mark.system("runc")


def observed(line: str) -> None:
    """Print the line that shows what came of the input; `pytest -rP` passes it on."""
    line = re.sub(r"/[^ \"]*/test_b\d[^/ \"]*", "/test", line.replace(str(TREE), "/test"))
    print("observed:", line.strip())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the root of a bundle, an image with nothing but /etc."""
    place = tmp_path / "rootfs"
    (place / "etc").mkdir(parents=True)
    (tmp_path / "config.json").write_text('{"root": {"path": "rootfs"}}')
    return place


def hook(
    root: Path, *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Run our hook on the bundle of *root*, with success; return what it says."""
    state = json.dumps({"ociVersion": "1.0.2", "bundle": str(root.parent)})
    done = subprocess.run(
        [HOOK, *words], input=state, env=env, cwd=cwd,
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


def found(root: Path, name: str) -> str:
    """Return where glibc's loader finds the library *name*."""
    rows = ldcache_merge.parse((root / "etc" / "ld.so.cache").read_bytes())
    return next(row[1] for row in rows if row[0] == name)


def configure(engine: str, config: Path, *words: str) -> str:
    """Configure *engine* by its file *config*, with success; return what that says."""
    done = subprocess.run(
        [PROGRAM, "runtime", "configure", "--runtime", engine, "--config", config,
         "--state-dir", config.parent / "state", *words],
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_b025_no_ldconfig_is_needed(root: Path) -> None:
    """Neither Ubuntu's nor another: what the host calls it does not matter."""
    told = hook(root, "update-container", "--ldconfig-path=/sbin/ldconfig.real", LIBRARY)
    assert told == ""
    assert found(root, "libnv.so.1") == "/opt/nv/libnv.so.1"
    observed(f"libnv.so.1 => {found(root, 'libnv.so.1')}")


@pytest.mark.parametrize("name", ["create-symlinks", "update-container"])
def test_b026_a_link_of_the_image_is_replaced(root: Path, name: str) -> None:
    """As by `ln -sf`; what it led to stays."""
    place = Path(f"{root}{LIBRARIES}")
    place.mkdir(parents=True)
    (place / "libGLX_mesa.so.0").write_text("mesa")
    link = place / "libGLX_indirect.so.0"
    link.symlink_to("libGLX_mesa.so.0")
    target = "libGLX_nvidia.so.535.183.01"
    assert hook(root, name, f"--link={target}::{LIBRARIES}/{link.name}") == ""
    assert os.readlink(link) == target
    assert (place / "libGLX_mesa.so.0").read_text() == "mesa"
    observed(f"{link.name} -> {os.readlink(link)}")


def test_b027_a_socket_that_is_gone_is_not_mounted(tmp_path: Path) -> None:
    """Nor is one that is not wanted."""
    flags = {
        "nvidia-container-runtime.modes.jit-cdi.nvcdi-feature-flags": ["disable-ipc-discoverer"]
    }
    path = "/run/nvidia-persistenced/socket"
    bind = f"import socket; socket.socket(socket.AF_UNIX).bind('{path}')"
    with ShimHost(tmp_path, "--gpus", "1") as host:
        host.shell(f'mkdir -p {path.rpartition("/")[0]}; {sys.executable} -c "{bind}"')
        document = asking("NVIDIA_VISIBLE_DEVICES=0")
        (mount,) = [m for m in host.create(document).config["mounts"] if m["source"] == path]
        assert "noexec" in mount["options"]
        assert "socket" not in host.create(document, flags).mounted
        host.shell(f"rm {path}")
        call = host.create(document)
    assert "socket" not in call.mounted
    assert call.gpus == [0]
    observed(f"after it is gone: exit status {call.returncode}, GPUs {call.gpus}")


def test_b054_musl_and_images_without_etc(root: Path) -> None:
    """The loader of musl has a list, that of glibc a cache; /etc is made for both."""
    (root / "lib").mkdir()
    (root / "lib" / "ld-musl-x86_64.so.1").touch()
    (root / "etc").rmdir()
    assert hook(root, "update-container", LIBRARY) == ""
    listed = (root / "etc" / "ld-musl-x86_64.path").read_text().split()
    assert listed == ["/lib", "/usr/local/lib", "/usr/lib", "/opt/nv"]
    assert found(root, "libnv.so.1") == "/opt/nv/libnv.so.1"
    observed(f"/etc/ld-musl-x86_64.path: {' '.join(listed)}")


def test_b055_the_newer_cuda_of_the_image(root: Path) -> None:
    """Used on an older driver; not on one that is as new, and never where it is switched off."""
    place = root / "usr" / "local" / "cuda" / "compat"
    place.mkdir(parents=True)
    (place / "libcuda.so.570.124.06").write_bytes(elf("libcuda.so.1"))
    (place / "libcuda.so.1").symlink_to("libcuda.so.570.124.06")
    conf = root / COMPAT
    for driver, is_used in (("515.105.01", True), ("580.65.06", False), ("570.1", False)):
        hook(root, "update-container", f"--cuda-compat={driver}", LIBRARY)
        assert conf.exists() is is_used, driver
    assert hook(root, "enable-cuda-compat", "--host-driver-version=515.105.01") == ""
    (line,) = [line for line in conf.read_text().splitlines() if line.startswith("/")]
    assert line == "/usr/local/cuda/compat"
    observed(f"/{COMPAT}: {line}")


@pytest.mark.parametrize(
    ("modifies", "has_params", "is_masked"), [(1, False, False), (0, True, False), (1, True, True)]
)
def test_b056_nothing_to_mask_is_no_failure(
    root: Path, tmp_path: Path, modifies: int, *, has_params: bool, is_masked: bool
) -> None:
    """A /proc without the driver's parameters, or a driver that makes no nodes anyway."""
    if has_params:
        params = root / "proc" / "driver" / "nvidia" / "params"
        params.parent.mkdir(parents=True)
        params.touch()
    state = json.dumps({"ociVersion": "1.0.2", "bundle": str(root.parent)})
    script = f"""printf %s '{state}' | {HOOK} disable-device-node-modification
        grep -c ' {root}/' /proc/self/mountinfo || true"""
    with ShimHost(tmp_path, "--gpus", "1", "--modify-device-files", str(modifies)) as host:
        done = host.run("sh", "-euc", script)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{int(is_masked)}\n"
    found = "parameters" if has_params else "no parameters"
    observed(f"ModifyDeviceFiles {modifies}, {found}: {done.stdout.strip()} mounts")


def test_b057_a_spec_whose_hook_is_not_there_is_told(tmp_path: Path) -> None:
    """By `cdi validate`, and the generator writes the path of a program that is."""
    edits = {"hooks": [{"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook-none"}]}
    spec = tmp_path / "nvidia.json"
    document = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "containerEdits": edits}
    devices = [{"name": "0", "containerEdits": {"env": ["A=b"]}}]
    spec.write_text(json.dumps({**document, "devices": devices}))
    done = subprocess.run(
        [PROGRAM, "cdi", "validate", spec], capture_output=True, text=True, check=False
    )
    (line,) = [text for text in done.stdout.splitlines() if "hook-program" in text]
    assert "nvidia-cdi-hook-none" in line
    observed(line)
    with ShimHost(tmp_path, "--gpus", "1") as host:
        told = host.shell(f"{PROGRAM} cdi generate --format json 2>/dev/null")
    (ours,) = json.loads(told)["containerEdits"]["hooks"]
    assert os.access(ours["path"], os.X_OK)


def test_b069_variables_of_the_image_do_not_reach_the_hook(root: Path) -> None:
    """Nor its working directory, which is the image's root."""
    mark = root.parent / "mark"
    code = f"open({str(mark)!r}, 'a').close()\n"
    for name in ("sitecustomize.py", "usercustomize.py", "start.py"):
        (root / name).write_text(code)
    hostile = {
        "LD_PRELOAD": "/proc/self/cwd/evil.so", "LD_LIBRARY_PATH": ".", "PYTHONPATH": ".",
        "PYTHONSTARTUP": "start.py", "PYTHONINSPECT": "1", "PATH": ".",
    }  # fmt: skip
    assert hook(root, "update-container", LIBRARY, env=hostile, cwd=root) == ""
    assert not mark.exists()
    observed(f"mark of the image: {mark.exists()}")
    # The control: a program in Python that trusts its environment runs the image's code.
    subprocess.run([sys.executable, "-c", ""], env=hostile, cwd=root, check=True,
                   stderr=subprocess.DEVNULL)  # fmt: skip
    assert mark.exists()


def test_b104_a_compat_directory_behind_absolute_links(root: Path) -> None:
    """They lead where the container sees them, and nothing of the host is looked at."""
    place = root / "usr" / "local" / "cuda-12" / "compat"
    place.mkdir(parents=True)
    (place / "libcuda.so.570.124.06").write_bytes(elf("libcuda.so.1"))
    (root / "etc" / "alternatives").mkdir()
    (root / "etc" / "alternatives" / "cuda").symlink_to("/usr/local/cuda-12")
    (root / "usr" / "local" / "cuda").symlink_to("/etc/alternatives/cuda")
    assert hook(root, "update-container", "--cuda-compat=515.105.01", LIBRARY) == ""
    (line,) = [line for line in (root / COMPAT).read_text().splitlines() if line[0] == "/"]
    assert line == "/usr/local/cuda-12/compat"
    observed(f"/{COMPAT}: {line}")


@pytest.mark.parametrize("name", ["create-symlinks", "update-container"])
def test_b120_no_link_is_made_outside(root: Path, name: str) -> None:
    """A path that climbs is refused; a parent that leads to / leads to the container's."""
    climbs = ("--link", "/etc/passwd::/../../../../tmp/x")
    state = json.dumps({"ociVersion": "1.0.2", "bundle": str(root.parent)})
    done = subprocess.run(
        [HOOK, name, *climbs], input=state, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    observed(done.stderr.splitlines()[0])
    (root / "out").symlink_to("/")
    target = root.name + "-of-b120"
    hook(root, name, f"--link=a::/out/{target}")
    assert os.readlink(root / target) == "a"
    assert not os.path.lexists(f"/{target}")


def test_b121_labels_stay_as_they_are(tmp_path: Path) -> None:
    """No file of the host gets another label: its other users would lose it."""
    label = "system_u:object_r:container_file_t:s0:c1,c2"
    with ShimHost(tmp_path, "--gpus", "1") as host:
        document = asking("NVIDIA_VISIBLE_DEVICES=0", linux={"mountLabel": label})
        config = host.create(document).config
    assert config["linux"]["mountLabel"] == label
    words = {word for mount in config["mounts"] for word in mount["options"]}
    assert words
    assert not words & {"z", "Z"}
    observed(f"mountLabel: {label}; options that relabel: {sorted(words & {'z', 'Z'})}")


def test_b137_links_are_made_without_ldconfig(root: Path, tmp_path: Path) -> None:
    """Those by SONAME are in the spec, and in the container before any loader looks."""
    with ShimHost(tmp_path, "--gpus", "1") as host:
        told = host.shell(f"{PROGRAM} cdi generate --format json 2>/dev/null")
    (ours,) = json.loads(told)["containerEdits"]["hooks"]
    links = [word for word in ours["args"] if word.endswith("/libnvidia-ml.so.1")]
    assert len(links) == 1
    hook(root, "update-container", "--link", links[0])
    target, _, path = links[0].partition("::")
    assert re.fullmatch(r"libnvidia-ml\.so\.[0-9.]{3,}", target)
    assert os.readlink(f"{root}{path}") == target
    observed(f"--link {links[0]}")


def test_b139_firmware_is_mounted_with_nothing_to_undo(tmp_path: Path) -> None:
    """A mount that is nosuid and nodev stays so; a host without firmware is as good."""
    with ShimHost(tmp_path, "--gpus", "1") as host:
        document = asking("NVIDIA_VISIBLE_DEVICES=0")
        mounts = host.create(document).config["mounts"]
        firmware = [m for m in mounts if "/firmware/" in m["destination"]]
        host.shell("rm -r /lib/firmware/nvidia")
        call = host.create(document)
    assert firmware
    assert all({"ro", "nosuid", "nodev"} <= set(m["options"]) for m in firmware)
    assert not any("/firmware/" in m["destination"] for m in call.config["mounts"])
    assert call.gpus == [0]
    observed(f"without firmware: exit status {call.returncode}, GPUs {call.gpus}")


def test_b140_arguments_that_others_write(root: Path) -> None:
    """The incumbent's names and forms, with the state on standard input or in a file."""
    assert hook(root, "create-symlinks", "--link", "a::b") == ""
    assert os.readlink(root / "b") == "a"
    state = root.parent / "state.json"
    state.write_text(json.dumps({"ociVersion": "1.0.2", "bundle": str(root.parent)}))
    hook(root, "create-symlinks", "--link=c::/d,e::/f", f"--container-spec={state}")
    assert [os.readlink(root / name) for name in "df"] == ["c", "e"]
    assert hook(root, "update-ldcache", "--folder", "/usr/lib") == ""
    told = hook(root, "of-a-later-version", "--any")
    assert "nothing is done" in told
    observed(told)


def test_b142_a_driver_in_a_root_of_its_own_needs_no_ldconfig(tmp_path: Path) -> None:
    """What ldconfig is called there, and whether there is one, does not matter."""
    with ShimHost(tmp_path, "--gpus", "1", "--separate-root") as host:
        root = host.shell("printf %s $SIMHOST_ROOT")
        assert host.shell(f"ls {root}/sbin/ldconfig* 2>/dev/null || true") == ""
        config = {
            "nvidia-container-cli.root": root,
            "nvidia-container-cli.ldconfig": "@/sbin/ldconfig.real",
        }
        call = host.create(asking("NVIDIA_VISIBLE_DEVICES=0"), config)
    (ours,) = call.config["hooks"]["createContainer"]
    assert not any("ldconfig" in word for word in ours["args"])
    assert call.gpus == [0]
    observed(f"GPUs {call.gpus}; arguments with ldconfig: 0")


def test_b029_the_second_time_nothing_is_to_restart(tmp_path: Path) -> None:
    """Who restarts when a line says `wrote` restarts once."""
    config = tmp_path / "daemon.json"
    assert "systemctl restart docker" in configure("docker", config)
    before = config.stat()
    told = configure("docker", config)
    assert "restart" not in told
    after = config.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    observed(told)


def test_b062_the_drop_in_is_where_containerd_reads(tmp_path: Path) -> None:
    """Its config names the directory, if it does not already; undo takes both away."""
    config = tmp_path / "config.toml"
    before = 'version = 2\nimports = ["/etc/other/*.toml"]\n'
    config.write_text(before)
    told = configure("containerd", config)
    imports = tomllib.loads(config.read_text())["imports"]
    assert imports == ["/etc/other/*.toml", f"{tmp_path}/conf.d/*.toml"]
    assert (tmp_path / "conf.d" / "99-gpuruntime.toml").exists()
    observed(f"imports: {imports[1]}")
    assert f'wrote "{tmp_path}/conf.d/99-gpuruntime.toml"' in told
    configure("containerd", config, "--undo")
    assert config.read_text() == before
    assert not (tmp_path / "conf.d").exists()


def test_b110_options_are_those_of_the_runtime_that_there_is(tmp_path: Path) -> None:
    """SystemdCgroup among them; without one to copy, and no kubelet, a warning says so."""
    runc = f'[plugins."{CRI}".containerd.runtimes.runc'
    config = tmp_path / "config.toml"
    config.write_text(
        f'version = 2\n{runc}]\nruntime_type = "io.containerd.runc.v2"\n'
        f"{runc}.options]\nSystemdCgroup = true\n"
    )
    configure("containerd", config)
    document = tomllib.loads((tmp_path / "conf.d" / "99-gpuruntime.toml").read_text())
    options = document["plugins"][CRI]["containerd"]["runtimes"]["gpuruntime"]["options"]
    assert options["SystemdCgroup"] is True
    observed(f"options: {', '.join(sorted(options))}")


def test_b111_the_file_says_its_version(tmp_path: Path) -> None:
    """No program on PATH does: it may be another containerd's."""
    names = {2: CRI, 3: "io.containerd.cri.v1.runtime"}
    for version, name in names.items():
        place = tmp_path / str(version)
        place.mkdir()
        (place / "config.toml").write_text(f"version = {version}\n")
        configure("containerd", place / "config.toml")
        written = tomllib.loads((place / "conf.d" / "99-gpuruntime.toml").read_text())
        assert written["version"] == version
        assert list(written["plugins"]) == [name]
        observed(f"version {version}: {name}")


def test_b112_a_config_that_another_has_written_again(tmp_path: Path) -> None:
    """`--check` finds it out, and changes nothing; `configure` again mends it."""
    config = tmp_path / "daemon.json"
    configure("docker", config)
    config.write_text('{"log-driver": "local"}\n')
    command = [PROGRAM, "runtime", "configure", "--runtime", "docker", "--config", config,
               "--state-dir", tmp_path / "state", "--check"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert config.read_text() == '{"log-driver": "local"}\n'
    (line,) = [line for line in done.stdout.splitlines() if "gpuruntime" in line and "{" in line]
    observed(line)
    configure("docker", config)
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
