# SPDX-License-Identifier: Apache-2.0
"""Reports of other generators' faults, each built as its input and asserted as what is right.

`docs/reference/bug-reports.md` has a row for each, with the line that the test prints as observed.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import driver_roots
import platform_roots
import pytest
from driver_roots import OTHER, VERSION
from shim_host import Done, Host

from gpuruntime.discover.search_paths import native_abi
from gpuruntime.formats import ldcache_merge

TREE = Path(__file__).parents[2]
PROGRAM = f"'{TREE}/.venv/bin/gpuruntime' cdi"
LIBRARIES = f"/usr/lib/{platform.machine()}-linux-gnu"
SPEC = "/run/cdi/nvidia.yaml"
JSON = "/run/cdi/nvidia.json"
# Places the NVML that answers, and what it reads, in directory $1 for driver $2.
PLACE_NVML = f"""
place_nvml() {{
    rm -f "$1/libnvidia-ml.so.$2"
    cp {LIBRARIES}/libnvidia-ml.so.{VERSION} "$1/libnvidia-ml.so.$2"
    sed "s/{VERSION}/$2/" "$SIMHOST_CONF" > "$1/fakenvml.conf"
}}
"""

pytestmark = pytest.mark.system
needs_x86_64 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="these driver roots are for x86-64"
)


def observed(line: str) -> None:
    """Print the line that shows how the input was taken; `pytest -rP` passes it on."""
    print("observed:", re.sub(r"/[^ \"]*/test_b\d+_[^/ \"]*", "/test", line).strip())


def on_host(script: str, *options: str) -> Done:
    """Run *script* on a simulated host with *options*.

    In it, $GENERATE generates, $REFRESH refreshes SPEC, and $INJECT injects.
    """
    hook = "--hook-path /usr/bin/gpu-cdi-hook"
    with Host(*options) as host:
        return host.run(
            *("sh", "-uc", PLACE_NVML + script),
            GENERATE=f"{PROGRAM} generate {hook}",
            REFRESH=f"{PROGRAM} refresh {hook} --output {SPEC}",
            INJECT=f"{PROGRAM} inject --spec-dir /run/cdi",
        )


def generated(script: str, *options: str) -> tuple[dict[str, Any], list[str]]:
    """Return the spec that *script* prints as JSON, and the lines beside it."""
    done = on_host(script, *options)
    assert done.returncode == 0, done.stderr
    spec: dict[str, Any] = json.loads(done.stdout)
    return spec, done.stderr.splitlines()


def refused(script: str, *options: str, status: int = 1) -> tuple[str, str]:
    """Return the error and the hint of *script*, which prints nothing and fails with *status*."""
    done = on_host(script, *options)
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    return error, hint


def mounts(spec: dict[str, Any]) -> dict[str, str]:
    """Return container path → host path."""
    return {m["containerPath"]: m["hostPath"] for m in spec["containerEdits"]["mounts"]}


def names(spec: dict[str, Any]) -> list[str]:
    """Return the names of a spec's devices."""
    return [device["name"] for device in spec["devices"]]


def node_paths(edits: dict[str, Any]) -> list[str]:
    """Return the paths of the nodes of *edits*."""
    return [node["path"] for node in edits["deviceNodes"]]


def hook_values(spec: dict[str, Any], option: str) -> list[str]:
    """Return the values of *option* in the hook's arguments."""
    args = spec["containerEdits"]["hooks"][0]["args"]
    return [args[i + 1] for i, word in enumerate(args) if word == option]


def missing_host_paths(spec: dict[str, Any]) -> list[str]:
    """Return the host paths of the driver's files that are not there, outside simulated hosts."""
    return [path for path in mounts(spec).values() if not os.path.lexists(path)]


def tree_with(path: Path, layout: str, version: str = VERSION) -> Path:
    """Make a driver root, to which the NVML is added on the simulated host."""
    driver_roots.build(path, layout, version)
    return path


@needs_x86_64
def test_b005_a_driver_update_changes_the_spec(tmp_path: Path) -> None:
    """After an update, refresh says what is another now; no path of the old driver is left."""
    old = tree_with(tmp_path / "old", "ubuntu", OTHER)
    new = tree_with(tmp_path / "new", "ubuntu")
    done = on_host(
        f"""set -e
        mkdir -m 755 /run/driver
        show() {{
            umount /run/driver 2>/dev/null || :
            mount --bind "$1" /run/driver
            place_nvml /run/driver{LIBRARIES} "$2"
            sed "s/Module  [0-9.]*/Module  $2/" /proc/driver/nvidia/version > /run/version
            cp /run/version /proc/driver/nvidia/version
        }}
        refresh() {{ eval "$REFRESH --driver-root /run/driver --dev-root /"; }}
        show {old} {OTHER}; refresh 2>/dev/null; grep -c '{OTHER}"' {SPEC}
        show {new} {VERSION}; refresh
        if grep -F '{OTHER}' {SPEC}; then exit 9; fi
        sed -n 's/.*hostPath: "\\(.*\\)".*/\\1/p' {SPEC} > /run/paths
        while read -r path; do test -e "$path"; done < /run/paths
        refresh
        """,
        *("--gpus", "1"),
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split("\n", 1)[0]) > 20
    lines = done.stderr.splitlines()
    changed = next(line for line in lines if line.startswith("changed since: "))
    assert "module version" in changed
    assert any(f"libEGL_nvidia.so.{OTHER}" in line for line in lines)
    assert lines[-1] == f'unchanged "{SPEC}": the host is as it was'
    observed(changed)


def test_b006_icds_are_found_where_distributions_have_them() -> None:
    """By any name, in /etc, /usr/share and XDG's directories; without one, that is told."""
    icd, egl = "/usr/share/vulkan/icd.d", "/usr/share/glvnd/egl_vendor.d/10_nvidia.json"
    platforms = "/usr/share/egl/egl_external_platform.d"
    generate = 'eval "$GENERATE --format json"'
    fedora = f"mv {icd}/nvidia_icd.json {icd}/nvidia_icd.x86_64.json"
    four = ("09_nvidia_wayland2", "10_nvidia_wayland", "15_nvidia_gbm", "20_nvidia_xcb")
    touch = "; ".join(f"echo {{}} > {platforms}/{name}.json" for name in four)
    spec, told = generated(f"{fedora}; {touch}; {generate}")
    there = mounts(spec)
    assert {f"{icd}/nvidia_icd.x86_64.json", egl} <= set(there.values())
    assert "/etc/vulkan/icd.d/nvidia_icd.x86_64.json" in there
    assert {f"{platforms}/{name}.json" for name in four} <= set(there)
    assert len(told) == 1

    in_etc = f"mkdir -p /etc/vulkan/icd.d; mv {icd}/nvidia_icd.json /etc/vulkan/icd.d"
    spec, _ = generated(f"{in_etc}; {generate}")
    assert "/etc/vulkan/icd.d/nvidia_icd.json" in mounts(spec)

    xdg = "/usr/x/share/vulkan/icd.d"
    elsewhere = (
        f"mkdir -p {xdg}; mv {icd}/nvidia_icd.json {xdg}; export XDG_DATA_DIRS=/usr/x/share"
    )
    spec, _ = generated(f"{elsewhere}; {generate}")
    assert f"{xdg}/nvidia_icd.json" in mounts(spec).values()

    spec, told = generated(f"rm {icd}/nvidia_icd.json {egl}; {generate}")
    vulkan = next(line for line in told if "Vulkan" in line)
    assert vulkan.startswith("warning: ")
    assert "icd.d" in vulkan
    assert any("EGL" in line and "egl_vendor.d" in line for line in told)
    # libXext is for the image to bring.
    assert not any("libXext" in path for path in mounts(spec))
    observed(vulkan)


def test_b007_a_driver_that_is_elsewhere_or_nowhere() -> None:
    """The root and the directories are told; so is the root to use, if there is one."""
    root = "/run/nvidia/driver"
    error, hint = refused(f'mkdir -p {root}{LIBRARIES}; eval "$GENERATE --driver-root {root}"')
    assert '"libnvidia-ml.so.1"' in error
    assert f'"{root}"' in error
    assert f"searched: {LIBRARIES}" in error
    assert 'there is one below "/"' in error
    assert 'use the driver root "/"' in hint
    observed(error)

    error, hint = refused(f'mkdir -p {root}; eval "$GENERATE --driver-root {root}"')
    assert 'there is one below "/"' in error
    assert 'use the driver root "/"' in hint

    error, hint = refused(f'rm {LIBRARIES}/libnvidia-ml.so*; eval "$GENERATE"')
    assert '"libnvidia-ml.so.1"' in error
    assert '"/"' in error
    assert LIBRARIES in error
    assert "install the driver's libraries of version 550.163.01" in hint


def test_b030_another_mig_layout_is_noticed() -> None:
    """Refresh sees that instances have changed, and waits for their nodes with the spec kept."""
    capability = "/proc/driver/nvidia/capabilities/gpu0/mig"
    done = on_host(
        f"""
        eval "$REFRESH" 2>/dev/null; cp {SPEC} /run/before
        sed -i /^mig.0.1/d "$SIMHOST_CONF"
        echo "mig 0 4 MIG-3a7c0004-51d2-5e0b-9f14-0b2a3c4d5e00 11 0 1 1 9856" >> "$SIMHOST_CONF"
        rm -r {capability}/gi8; mkdir -p {capability}/gi11/ci0
        printf 'DeviceFileMinor: 102\\nDeviceFileMode: 292\\n' > {capability}/gi11/access
        printf 'DeviceFileMinor: 103\\nDeviceFileMode: 292\\n' > {capability}/gi11/ci0/access
        eval "$REFRESH"; echo $?; cmp {SPEC} /run/before && echo kept
        for n in 102 103; do mknod /dev/nvidia-caps/nvidia-cap$n c 236 $n; done
        eval "$REFRESH"; echo $?
        grep -o 'name: "0:.*"' {SPEC}; grep -o 'nvidia-cap10.' {SPEC} | sort -u
        """,
        *("--gpus", "1", "--mig", "0:2"),
    )
    lines = ["1", "kept", "0", 'name: "0:0"', 'name: "0:4"', "nvidia-cap102", "nvidia-cap103"]
    assert done.stdout.splitlines() == lines, done.stderr
    assert '"/dev/nvidia-caps/nvidia-cap102"' in done.stderr
    changed = [line for line in done.stderr.splitlines() if line.startswith("changed since: ")]
    assert len(changed) == 2
    assert "MIG devices" in changed[0]
    observed(changed[0])


@needs_x86_64
def test_b045_with_and_without_a_loader_cache(tmp_path: Path) -> None:
    """The cache names a directory that nobody else does; without it, others are searched."""
    private = "/var/lib/nvidia/lib64"
    root = tree_with(tmp_path / "only", "cache-only")
    generate = 'eval "$GENERATE --format json --driver-root {0} --dev-root /"'
    spec, _ = generated(f"place_nvml {root}{private} {VERSION}; {generate.format(root)}")
    cuda = f"libcuda.so.{VERSION}"
    assert mounts(spec)[f"{private}/{cuda}"] == f"{root}{private}/{cuda}"

    cache = (root / "etc/ld.so.cache").read_bytes()
    other_order = bytearray(cache)
    other_order[28] = 3
    names_at = 16 + 12
    path = f"{private}/libcuda.so.1".encode()
    old = struct.pack("<12sIiII", b"ld.so-1.7.0", 1, 0x303, 0, 13) + b"libcuda.so.1\0" + path
    assert len(old) > names_at
    unread = {
        "none": None,
        "order": bytes(other_order),
        "old": old,
        "cut": cache[:40],
        "empty": b"",
    }
    for name, content in unread.items():
        # Neither stands in the way of what the loader's configuration names …
        tree = driver_roots.build(tmp_path / f"configured-{name}", "cache-only")
        tree.at("/etc/ld.so.cache").unlink()
        tree.file("/etc/ld.so.conf", f"{private}\n")
        if content is not None:
            tree.file("/etc/ld.so.cache", content)
        place = f"place_nvml {tree.path}{private} {VERSION}"
        spec, told = generated(f"{place}; {generate.format(tree.path)}")
        assert f"{private}/{cuda}" in mounts(spec), name
        assert len(told) == 1, name
        # … nor of the usual places.
        tree = driver_roots.build(tmp_path / f"usual-{name}", "rhel")
        if content is not None:
            tree.file("/etc/ld.so.cache", content)
        place = f"place_nvml {tree.path}/usr/lib64 {VERSION}"
        spec, told = generated(f"{place}; {generate.format(tree.path)}")
        assert f"/usr/lib64/{cuda}" in mounts(spec), name
        assert len(told) == 1, name
    observed(told[0])


def test_b046_a_fresh_boot_without_nodes() -> None:
    """No spec rather than one without uvm, and what failed is tried again."""
    error, hint = refused('rm /dev/nvidia-uvm; eval "$GENERATE"')
    assert '"/dev/nvidia-uvm"' in error
    assert "create-device-nodes --all" in hint
    observed(error)
    error, hint = refused(
        'rm /dev/nvidia*[0-9lm]; eval "$GENERATE" 2>/run/told; s=$?; '
        'grep -E "^(error|hint)" /run/told >&2; exit $s',
        "--gpus",
        "2",
    )
    assert '"/dev/nvidia0"' in error
    assert '"/dev/nvidia1"' in error
    assert "create-device-nodes" in hint

    done = on_host(
        f"""rm /dev/nvidia-uvm; eval "$REFRESH" 2>/dev/null; echo $?; ls /run/cdi
        mknod /dev/nvidia-uvm c 511 0; eval "$REFRESH" 2>/dev/null; echo $?; ls /run/cdi
        grep -o 'path: "/dev/nvidia-uvm"' {SPEC}
        """
    )
    assert done.stdout.splitlines() == ["1", "0", "nvidia.yaml", 'path: "/dev/nvidia-uvm"']


def test_b047_majors_are_those_of_the_running_kernel() -> None:
    """A spec has no numbers, so one of another boot gives what the node is now."""
    done = on_host(
        f"""set -e
        eval "$GENERATE --output {JSON}" 2>/dev/null; cp {JSON} /run/before
        for n in 0 1; do
            test $n = 0 && node=/dev/nvidia-uvm || node=/dev/nvidia-uvm-tools
            rm $node; mknod -m 666 $node c 509 $n
        done
        sed s/511.nvidia-uvm/509\\ nvidia-uvm/ /proc/devices > /run/devices
        cp /run/devices /proc/devices
        echo '{{}}' | eval "$INJECT --device nvidia.com/gpu=0" > /run/config.json
        eval "$GENERATE --output {JSON}" 2>/dev/null; cmp {JSON} /run/before
        cat /run/config.json; echo ,; cat {JSON}
        """,
        *("--gpus", "1"),
    )
    assert done.returncode == 0, done.stderr
    config, _, spec = done.stdout.partition("\n,\n")
    assert '"major"' not in spec
    assert '"minor"' not in spec
    linux = json.loads(config)["linux"]
    uvm = next(node for node in linux["devices"] if node["path"] == "/dev/nvidia-uvm")
    assert (uvm["major"], uvm["minor"]) == (509, 0)
    rules = {(rule["major"], rule["minor"]) for rule in linux["resources"]["devices"]}
    assert (509, 0) in rules
    assert (511, 0) not in rules
    observed(json.dumps(uvm))


@needs_x86_64
def test_b049_debian_alternatives_have_links_where_programs_look(tmp_path: Path) -> None:
    """The files stay in their private directory; links in the usual one lead there."""
    root = tree_with(tmp_path / "debian", "debian")
    private = f"{LIBRARIES}/nvidia/current"
    spec, _ = generated(
        f"place_nvml {root}{private} {VERSION}; "
        f'eval "$GENERATE --format json --driver-root {root} --dev-root /"'
    )
    assert mounts(spec)[f"{private}/libcuda.so.{VERSION}"].startswith(f"{root}{private}/")
    links = hook_values(spec, "--link")
    cuda = f"nvidia/current/libcuda.so.1::{LIBRARIES}/libcuda.so.1"
    assert cuda in links
    assert f"nvidia/current/libnvidia-ml.so.1::{LIBRARIES}/libnvidia-ml.so.1" in links
    # For programs of another distribution, the loader's cache.
    assert f"libcuda.so.1::{private}/libcuda.so.{VERSION}::x86-64" in hook_values(
        spec, "--library"
    )
    assert mounts(spec)["/usr/bin/nvidia-smi"] == f"{root}/usr/lib/nvidia/current/nvidia-smi"
    observed(f"--link {cuda}")


def test_b050_a_jetson_has_what_its_board_has(tmp_path: Path) -> None:
    """A listed node that the board lacks is a warning; other lists are on request."""
    root = platform_roots.tegra(tmp_path / "root").path
    try:
        script = f'eval "$GENERATE --format json --driver-root {root}"'
        spec, lines = generated(script, "--gpus", "1")
        assert names(spec) == ["0", "all"]
        devices = spec["devices"][0]["containerEdits"]
        assert node_paths(devices) == [
            *("/dev/nvhost-ctrl", "/dev/nvmap", "/dev/nvgpu/igpu0/as", "/dev/nvgpu/igpu0/ctrl")
        ]
        assert "/usr/local/cuda" not in mounts(spec)
        (warning,) = (line for line in lines if line.startswith("warning: "))
        assert 'line 4: no device node "/dev/nvidiactl"' in warning
        files = f"--csv.file {root}{platform_roots.CSV}/cuda.csv"
        files += f" --csv.file {root}{platform_roots.CSV}/devices.csv"
        spec, _ = generated(f'eval "$GENERATE --format json --driver-root {root} {files}"')
        assert "/usr/local/cuda" in mounts(spec)
    finally:
        shutil.rmtree(root)
    observed(warning)


def test_b051_gpudirect_has_its_nodes(tmp_path: Path) -> None:
    """A kind for each; also where the driver's own root, from a container, has no such nodes."""
    (tmp_path / "dev").mkdir()
    features = [word for name in ("gds", "mofed", "gdrcopy") for word in ("--feature", name)]
    for root in ("/", str(tmp_path)):
        for mode, nodes in (
            ("gdrcopy", ["/dev/gdrdrv"]),
            ("mofed", ["/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0"]),
            ("gds", [f"/dev/nvidia-fs{number}" for number in (0, 1, 2, 10)]),
        ):
            spec, _ = generated(
                f'eval "$GENERATE --mode {mode} --dev-root {root} --format json"', *features
            )
            assert spec["kind"] == f"nvidia.com/{mode}"
            assert names(spec) == ["all"]
            assert node_paths(spec["devices"][0]["containerEdits"]) == nodes
    observed(", ".join(nodes))
    error, _ = refused('eval "$GENERATE --mode gds"', "--gpus", "1")
    assert '"/dev/nvidia-fs*"' in error


@needs_x86_64
@pytest.mark.parametrize(
    ("layout", "directory", "program", "host_program"),
    [
        ("opt", "/lib64", "/bin/nvidia-smi", "/bin/nvidia-smi"),
        (
            *("talos", "/usr/local/glibc/usr/lib64"),
            *("/usr/bin/nvidia-smi", "/usr/local/glibc/usr/bin/nvidia-smi"),
        ),
    ],
)
def test_b052_a_driver_in_a_root_of_its_own(
    tmp_path: Path, layout: str, directory: str, program: str, host_program: str
) -> None:
    """Driver and nodes have roots of their own; in the container paths are those in the root."""
    root = tree_with(tmp_path / layout, layout)
    place = f"rm {LIBRARIES}/libcuda*; place_nvml {root}{directory} {VERSION}; "
    spec, _ = generated(
        f'{place} eval "$GENERATE --format json --driver-root {root} --dev-root /"'
    )
    cuda = f"{directory}/libcuda.so.{VERSION}"
    there = mounts(spec)
    assert there[cuda] == f"{root}{cuda}"
    assert there[program] == f"{root}{host_program}"
    assert all(path.startswith(f"{root}/") for path in there.values())
    assert missing_host_paths(spec) == []
    assert all("hostPath" not in node for node in spec["containerEdits"]["deviceNodes"])
    observed(f'hostPath: "{there[cuda]}", containerPath: "{cuda}"')


def test_b064_mig_mode_in_every_state() -> None:
    """A GPU without instances is told and left; the others are as they were."""
    generate = 'eval "$GENERATE --format json --device-name-strategy index"'
    spec, told = generated(generate, "--gpus", "2", "--mig", "0:0")
    assert names(spec) == ["1", "all"]
    assert told[0].startswith("warning: ")
    assert "GPU 0 is in MIG mode and has no MIG device" in told[0]
    observed(told[0])

    error, hint = refused(
        'eval "$GENERATE" 2>/run/told; s=$?; grep -E "^(error|hint)" /run/told >&2; exit $s',
        *("--gpus", "1", "--mig", "0:0"),
    )
    assert "no MIG device" in error
    assert "nvidia-smi mig" in hint

    spec, told = generated(generate, "--gpus", "2", "--mig", "all:2")
    assert names(spec) == ["0:0", "0:1", "1:0", "1:1", "all"]
    assert len(told) == 1

    larger = 'sed -i "/^mig 0 1/s/ 1 1 9856/ 3 3 40000/" "$SIMHOST_CONF"'
    spec, told = generated(f"{larger}; {generate}", "--gpus", "2", "--mig", "0:2")
    assert names(spec) == ["0:0", "0:1", "1", "all"]
    assert len(told) == 1


@needs_x86_64
def test_b071_a_farm_of_links_into_a_store(tmp_path: Path) -> None:
    """Links are followed to the store; found by themselves, or where a search path says."""
    root = tree_with(tmp_path / "nixos", "nixos")
    store = f"/nix/store/0a1b2c3d4e5f-nvidia-x11-{VERSION}-6.6.30/lib"
    assert (root / store[1:]).is_dir()
    farm = "/run/opengl-driver/lib"
    hook = "/nix/store/h-tools/bin/nvidia-cdi-hook"
    ldconfig = "/nix/store/g-glibc/bin/ldconfig"
    place = f"place_nvml {root}{store} {VERSION}; "
    arguments = f"--format json --driver-root {root} --dev-root /"
    spec, _ = generated(f'{place} eval "$GENERATE {arguments}"')
    cuda = f"{store}/libcuda.so.{VERSION}"
    assert mounts(spec)[cuda] == f"{root}{cuda}"
    links = hook_values(spec, "--link")
    assert f"{os.path.relpath(store, farm)}/libcuda.so.1::{farm}/libcuda.so.1" in links
    assert any(path.endswith("/vulkan/icd.d/nvidia_icd.x86_64.json") for path in mounts(spec))
    # The program as NVIDIA built it: the other one needs a loader of the store.
    assert mounts(spec)["/usr/bin/nvidia-smi"].endswith("/origBin/nvidia-smi")
    observed(f'hostPath: "{root}{cuda}"')

    given, _ = generated(
        f'{place} eval "$GENERATE {arguments} --library-search-path {root}{store} '
        f'--ldconfig-path {ldconfig} --nvidia-cdi-hook-path {hook}"'
    )
    assert cuda in mounts(given)
    hooks = given["containerEdits"]["hooks"]
    assert {each["path"] for each in hooks} == {hook}
    assert {each["args"][0] for each in hooks} == {"nvidia-cdi-hook"}
    update = next(each["args"] for each in hooks if "update-ldcache" in each["args"])
    assert update[update.index("--ldconfig-path") + 1] == ldconfig
    assert update[update.index("--folder") + 1] == store


@needs_x86_64
def test_b099_search_paths_for_libraries_and_for_files(tmp_path: Path) -> None:
    """Both options are repeatable, and both are obeyed."""
    snap = driver_roots.Tree(tmp_path / "snap")
    triplet = "/graphics/lib/x86_64-linux-gnu"
    compute = driver_roots.COMPUTE
    snap.libraries(triplet, compute)
    snap.libraries("/more", (library for library in driver_roots.ALL if library not in compute))
    snap.configs("config/vulkan/icd.d/nvidia_icd.json", "extra/glvnd/egl_vendor.d/10_nvidia.json")
    libraries = (
        f"--library-search-path {snap.path}{triplet} --library-search-path {snap.path}/more"
    )
    configs = f"--config-search-path {snap.path}/config --config-search-path {snap.path}/extra"
    place = f"place_nvml {snap.path}{triplet} {VERSION}; rm {LIBRARIES}/*.so.{VERSION}; "
    place += "rm /usr/share/vulkan/icd.d/* /usr/share/glvnd/egl_vendor.d/10_nvidia.json; "
    spec, told = generated(f'{place} eval "$GENERATE --format json {libraries} {configs}"')
    there = set(mounts(spec).values())
    assert f"{snap.path}{triplet}/libcuda.so.{VERSION}" in there
    assert f"{snap.path}/more/libGLX_nvidia.so.{VERSION}" in there
    assert f"{snap.path}/config/vulkan/icd.d/nvidia_icd.json" in there
    assert f"{snap.path}/extra/glvnd/egl_vendor.d/10_nvidia.json" in there
    assert len(told) == 1
    observed(told[0])

    error, _ = refused(f'{place} eval "$GENERATE --library-search-path {snap.path}/none"')
    assert "libnvidia-ml.so.1" in error


@needs_x86_64
@pytest.mark.parametrize(
    ("layout", "native", "small"),
    [
        ("arch", "/usr/lib", "/usr/lib32"),
        ("ubuntu", "/usr/lib/x86_64-linux-gnu", "/usr/lib/i386-linux-gnu"),
    ],
)
def test_b100_libraries_for_32_bit_programs(
    tmp_path: Path, layout: str, native: str, small: str
) -> None:
    """They are told by their ELF headers, and come with a capability of their own."""
    tree = driver_roots.build(tmp_path / layout, layout)
    tree.cache(
        ("libcuda.so.1", f"{small}/libcuda.so.1", "i386"),
        ("libcuda.so.1", f"{native}/libcuda.so.1", "x86-64"),
    )
    place = f"place_nvml {tree.path}{native} {VERSION}; "
    arguments = f"--format json --driver-root {tree.path} --dev-root /"
    files = {}
    for wanted in ("all", "compute", "compute,compat32"):
        spec, _ = generated(f'{place} eval "$GENERATE {arguments} --driver-capabilities {wanted}"')
        files[wanted] = spec
        assert f"{native}/libcuda.so.{VERSION}" in mounts(spec)
    cuda = f"{small}/libcuda.so.{VERSION}"
    assert cuda in mounts(files["all"])
    assert cuda in mounts(files["compute,compat32"])
    assert not any(path.startswith(f"{small}/") for path in mounts(files["compute"]))
    entry = f"libcuda.so.1::{cuda}::i386"
    assert entry in hook_values(files["all"], "--library")
    observed(f"--library {entry}")


def test_b101_wsl_has_the_store_of_the_nvidia_adapter(tmp_path: Path) -> None:
    """Another vendor's adapter and a driver store that no adapter names are left alone."""
    root = tmp_path / "root"
    stores = (platform_roots.INTEL, platform_roots.STORE)
    tree = platform_roots.wsl(root, *(f"adapter {root}{store}" for store in stores))
    try:
        tree.file(f"{platform_roots.INTEL}/libze_intel_gpu.so.1", driver_roots.elf("x.so.1"))
        platform_roots.store(tree, platform_roots.LEFT_OVER)
        spec, lines = generated(f'eval "$GENERATE --format json --driver-root {root}"')
        assert names(spec) == ["all"]
        assert node_paths(spec["devices"][0]["containerEdits"]) == ["/dev/dxg"]
        directories = {os.path.dirname(path) for path in mounts(spec)}
        assert directories == {"/usr/lib/wsl/lib", platform_roots.STORE}
        link = f"libcuda.so.1.1::{platform_roots.STORE}/libcuda.so.1"
        assert link in hook_values(spec, "--link")
        decision = next(line for line in lines if "WSL" in line)
    finally:
        shutil.rmtree(root)
    observed(decision)


def test_b114_mig_devices_need_their_capability_nodes() -> None:
    """A container with the GPU alone would see nothing that it can use: no spec."""
    error, hint = refused(
        'eval "$GENERATE"',
        *("--gpus", "1", "--mig", "0:1", "--fault", "nonode nvidia-caps/nvidia-cap6[67]"),
    )
    assert "MIG device 0:0" in error
    assert '"/dev/nvidia-caps/nvidia-cap66"' in error
    assert "create-device-nodes --all" in hint
    observed(error)
    # Who asks for another device does not miss it.
    spec, told = generated(
        'eval "$GENERATE --device-id 1 --device-name-strategy index --format json"',
        *("--gpus", "2", "--mig", "0:1", "--fault", "nonode nvidia-caps/nvidia-cap6[67]"),
    )
    assert names(spec) == ["1", "all"]
    assert told[0].startswith("warning: MIG device 0:0 is left out: ")
    spec, _ = generated('eval "$GENERATE --format json"', "--gpus", "1", "--mig", "0:1")
    device = next(device for device in spec["devices"] if device["name"] == "0:0")
    assert node_paths(device["containerEdits"]) == [
        "/dev/nvidia0",
        "/dev/nvidia-caps/nvidia-cap66",
        "/dev/nvidia-caps/nvidia-cap67",
    ]


def test_b124_a_cache_without_the_driver_and_a_library_that_crashes(tmp_path: Path) -> None:
    """Files beside the cache are found; of the driver only NVML is loaded, and not in-process."""
    crash = tmp_path / "crash.c"
    crash.write_text("#include <stdlib.h>\n__attribute__((constructor)) void f(void) { abort(); }")
    library = tmp_path / "crash.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, crash], check=True, timeout=30)
    entry = ldcache_merge.CacheEntry(
        "libc.so.6", f"{LIBRARIES}/libc.so.6", ldcache_merge.ABI_FLAGS[native_abi()]
    )
    cache = tmp_path / "cache"
    cache.write_bytes(ldcache_merge.merge(None, [entry]))
    bare = f"cp {cache} /etc/ld.so.cache; rm /etc/ld.so.conf; "
    bare += "ldconfig -p > /run/p; test $(grep -c libcuda /run/p) = 0; "
    helper = f"cp {library} {LIBRARIES}/libnvidia-sandboxutils.so.{VERSION}; "
    helper += f"cp {library} {LIBRARIES}/libnvsandboxutils.so.{VERSION}; "
    spec, _ = generated(f'set -e; {helper} {bare} eval "$GENERATE --format json"')
    assert f"{LIBRARIES}/libcuda.so.{VERSION}" in mounts(spec)
    error, _ = refused(
        f"cp --remove-destination {library} {LIBRARIES}/libnvidia-ml.so.{VERSION}; "
        'eval "$GENERATE"'
    )
    assert f"libnvidia-ml.so.{VERSION}" in error
    observed(error)


def test_b134_an_old_nvml_and_an_empty_bus_id() -> None:
    """What needs the function or the bus id is left out, and nothing else."""
    spec, told = generated(
        'eval "$GENERATE --format json --device-name-strategy index"',
        *("--gpus", "2", "--mig", "1:1", "--fault", "nobusid 0"),
        *("--fault", "nosymbol nvmlDeviceGetMaxMigDeviceCount"),
    )
    assert names(spec) == ["0", "1:0", "all"]
    assert node_paths(spec["devices"][0]["containerEdits"]) == ["/dev/nvidia0"]
    assert "pci--" not in json.dumps(spec)
    observed(told[-1])
    spec, _ = generated(
        'eval "$GENERATE --format json --device-name-strategy index"',
        *("--gpus", "1", "--fault", "nosymbol nvmlDeviceGetMigMode"),
    )
    assert names(spec) == ["0", "all"]


def test_b136_the_group_of_a_node() -> None:
    """The node in the container has the host's group and mode, and a user can get the group."""
    done = on_host(
        f"""set -e
        chgrp 44 /dev/nvidia0; chmod 440 /dev/nvidia0
        eval "$GENERATE --additional-gids --output {JSON}" 2>/dev/null
        echo '{{}}' | eval "$INJECT --device nvidia.com/gpu=0"; echo ,; cat {JSON}
        """,
        *("--gpus", "1"),
    )
    assert done.returncode == 0, done.stderr
    config, _, spec = done.stdout.partition("\n,\n")
    assert json.loads(spec)["devices"][0]["containerEdits"]["additionalGids"] == [44]
    seen = json.loads(config)
    node = next(n for n in seen["linux"]["devices"] if n["path"] == "/dev/nvidia0")
    observed(json.dumps(node))
    assert node["fileMode"] & 0o777 == 0o440
    assert 44 in seen["process"]["user"]["additionalGids"]
    assert node["gid"] == 44
