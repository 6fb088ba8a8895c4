# SPDX-License-Identifier: Apache-2.0
"""The driver's files beside the libraries: programs, configuration, Xorg, firmware, sockets."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from driver_roots import COMPUTE, VERSION, Tree, elf

from gpuruntime.discover import fingerprint, search_paths
from gpuruntime.discover.user_space import DriverRoot, find_driver
from gpuruntime.model import Driver
from gpuruntime.plan import gpu_edits

LIBRARIES = "/usr/lib64"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Return the root of a driver that has libraries and nothing else."""
    made = Tree(tmp_path / "root")
    made.libraries(LIBRARIES)
    return made


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what the environment of the tests may say."""
    for name in ("XDG_DATA_DIRS", "CUDA_MPS_PIPE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)


def found(tree: Tree, *config_search_path: str) -> Driver:
    """Return the driver in *tree*."""
    return find_driver(
        DriverRoot(str(tree.path)),
        VERSION,
        native="x86-64",
        config_search_path=config_search_path,
        kernel_release="6.1.0-28-amd64",
    )


def paths(tree: Tree, kind: str = "config", *config_search_path: str) -> dict[str, str]:
    """Return container path → path in the root of the files of *kind*."""
    return {
        file.container_path: file.host_path.removeprefix(str(tree.path))
        for file in found(tree, *config_search_path).files
        if file.kind == kind
    }


def sockets(directory: Path, *names: str) -> None:
    """Make sockets below *directory*, whose path may be too long for one."""
    here = os.getcwd()
    for name in names:
        place = directory / name
        place.parent.mkdir(parents=True, exist_ok=True)
        os.chdir(place.parent)
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(place.name)
        finally:
            os.chdir(here)


EGL = "share/egl/egl_external_platform.d"


@pytest.mark.parametrize(
    "path",
    [
        "/etc/OpenCL/vendors/nvidia.icd",
        "/etc/glvnd/egl_vendor.d/10_nvidia.json",
        "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
        "/etc/egl/egl_external_platform.d/15_nvidia_gbm.json",
        f"/usr/{EGL}/09_nvidia_wayland2.json",
        f"/usr/{EGL}/10_nvidia_wayland.json",
        f"/usr/{EGL}/20_nvidia_xcb.json",
        f"/usr/{EGL}/20_nvidia_xlib.json",
        f"/usr/{EGL}/99_nvidia_of_tomorrow.json",
        "/usr/share/nvidia/nvoptix.bin",
        f"/usr/share/nvidia/nvidia-application-profiles-{VERSION}-rc",
        "/etc/X11/xorg.conf.d/10-nvidia.conf",
        "/usr/share/X11/xorg.conf.d/nvidia-drm-outputclass.conf",
        "/usr/share/X11/xorg.conf.d/10-nvidia-drm-outputclass.conf",
    ],
)
def test_configuration_keeps_its_place(path: str, tree: Tree) -> None:
    """B006: the same loaders run in the container and look in the same places."""
    tree.file(path, "{}")
    assert paths(tree) == {path: path}


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/usr/local/share/glvnd/egl_vendor.d/10_nvidia.json", "/usr/share"),
        ("/usr/local/share/nvidia/nvoptix.bin", "/usr/share"),
        ("/usr/share/OpenCL/vendors/nvidia.icd", "/etc"),
        ("/share/glvnd/egl_vendor.d/10_nvidia.json", "/usr/share"),
        ("/opt/gpu/etc/OpenCL/vendors/nvidia.icd", "/etc"),
        ("/opt/gpu/etc/glvnd/egl_vendor.d/10_nvidia.json", "/etc"),
        ("/opt/gpu/share/nvidia/nvoptix.bin", "/usr/share"),
    ],
)
def test_configuration_is_where_loaders_of_images_look(
    path: str, place: str, tmp_path: Path
) -> None:
    """They do not know the host's own prefix, nor the directories beside its libraries."""
    tree = Tree(tmp_path / "root")
    tree.libraries("/opt/gpu/lib64" if path.startswith("/opt") else "/lib64", COMPUTE)
    tree.file("/etc/ld.so.conf", "/opt/gpu/lib64\n")
    tree.file(path, "{}")
    name = path.partition("share/")[2] or path.partition("etc/")[2]
    assert paths(tree) == {f"{place}/{name}": path}


def test_a_file_beside_the_libraries_is_not_delivered_twice(tmp_path: Path) -> None:
    """The usual directory comes first: it may have a link to the file, or another file."""
    tree = Tree(tmp_path / "root")
    tree.libraries("/opt/gpu/lib64", COMPUTE)
    tree.file("/etc/ld.so.conf", "/opt/gpu/lib64\n")
    name = "glvnd/egl_vendor.d/10_nvidia.json"
    other = "egl/egl_external_platform.d/15_nvidia_gbm.json"
    for path in (name, other):
        tree.file(f"/opt/gpu/share/{path}", "{}")
    tree.file(f"/etc/{name}", "{}")
    assert paths(tree) == {
        f"/etc/{name}": f"/etc/{name}",
        f"/usr/share/{other}": f"/opt/gpu/share/{other}",
    }


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/etc/vulkan/icd.d/nvidia_icd.json", "icd.d/nvidia_icd.json"),
        ("/usr/share/vulkan/icd.d/nvidia_icd.x86_64.json", "icd.d/nvidia_icd.x86_64.json"),
        ("/usr/local/share/vulkan/icd.d/nvidia_icd.json", "icd.d/nvidia_icd.json"),
        ("/vulkan/icd.d/nvidia_icd.json", "icd.d/nvidia_icd.json"),
        ("/usr/share/vulkan/icd.d/nvidia_layers.json", "icd.d/nvidia_layers.json"),
        (
            "/usr/share/vulkan/implicit_layer.d/nvidia_layers.json",
            "implicit_layer.d/nvidia_layers.json",
        ),
        (
            "/run/opengl-driver/share/vulkan/icd.d/nvidia_icd.x86_64.json",
            "icd.d/nvidia_icd.x86_64.json",
        ),
    ],
)
def test_files_of_vulkan_come_to_one_place(path: str, name: str, tree: Tree) -> None:
    """The loader of each distribution looks in /etc; some hosts have them where none looks."""
    tree.file(path, "{}")
    assert paths(tree) == {f"/etc/vulkan/{name}": path}


def test_files_of_vulkan_come_once(tree: Tree) -> None:
    """With two the loader would show each GPU twice."""
    for place in ("/etc", "/usr/share", "/usr/local/share", ""):
        tree.file(f"{place}/vulkan/icd.d/nvidia_icd.json", "{}")
    icd = "/etc/vulkan/icd.d/nvidia_icd.json"
    assert paths(tree) == {icd: icd}


@pytest.mark.parametrize(
    "path",
    [
        "/usr/share/vulkan/icd.d/intel_icd.x86_64.json",
        "/usr/share/vulkan/icd.d/nvidia_icd.aarch64.json",
        "/usr/share/glvnd/egl_vendor.d/50_mesa.json",
        "/etc/OpenCL/vendors/pocl.icd",
        "/usr/share/nvidia/nvidia-application-profiles-535.1-rc",
        "/etc/X11/xorg.conf.d/20-nvidia-of-this-machine.conf",
        "/home/user/vulkan/icd.d/nvidia_icd.json",
    ],
)
def test_configuration_of_others_stays(path: str, tree: Tree) -> None:
    """Of other vendors, machines, drivers, and of the machine's own administrator."""
    tree.file(path, "{}")
    assert paths(tree) == {}


def test_data_directories_of_the_environment_are_searched(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B006: and the usual ones as well; what is no absolute path is none."""
    monkeypatch.setenv("XDG_DATA_DIRS", ":share:/opt/share/:/opt/gone:/usr/share:/opt/../x:/o p")
    tree.file("/opt/share/glvnd/egl_vendor.d/10_nvidia.json", "{}")
    tree.file("/usr/share/glvnd/egl_vendor.d/11_nvidia.json", "{}")
    tree.file("/x/glvnd/egl_vendor.d/12_nvidia.json", "{}")
    tree.file("/o p/glvnd/egl_vendor.d/13_nvidia.json", "{}")
    assert sorted(paths(tree)) == [
        "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
        "/usr/share/glvnd/egl_vendor.d/11_nvidia.json",
        "/usr/share/glvnd/egl_vendor.d/12_nvidia.json",
    ]
    assert any("13_nvidia.json" in problem for problem in found(tree).problems)


def test_a_config_search_path_is_in_place_of_the_usual(tree: Tree) -> None:
    """B099: in the root, below it; it had no effect in the incumbent for a year."""
    tree.file("/usr/share/glvnd/egl_vendor.d/10_nvidia.json", "{}")
    tree.file("/srv/config/glvnd/egl_vendor.d/10_nvidia.json", "{}")
    assert paths(tree, "config", f"{tree.path}/srv/config/") == {
        "/usr/share/glvnd/egl_vendor.d/10_nvidia.json": (
            "/srv/config/glvnd/egl_vendor.d/10_nvidia.json"
        )
    }


def test_libraries_without_an_icd_are_told(tree: Tree) -> None:
    """B006: else the container has a library that nothing finds."""
    vulkan, egl = found(tree).problems
    assert f'"{tree.path}{LIBRARIES}/libGLX_nvidia.so.{VERSION}"' in vulkan
    assert '"vulkan/icd.d"' in vulkan
    assert '"glvnd/egl_vendor.d"' in egl
    tree.configs()
    assert found(tree).problems == ()


def test_without_graphics_no_icd_is_missed(tmp_path: Path) -> None:
    """A headless server has neither."""
    tree = Tree(tmp_path / "root")
    tree.libraries(LIBRARIES, COMPUTE)
    assert found(tree).problems == ()


@pytest.mark.parametrize(
    ("libraries", "programs"),
    [
        ("/var/lib/nvidia/lib64", "/var/lib/nvidia/bin"),
        ("/usr/local/nvidia/lib", "/usr/local/nvidia/bin"),
        ("/opt/nv/lib/x86_64-linux-gnu", "/opt/nv/bin"),
        ("/opt/nvidia/550/libraries", "/opt/nvidia/550/bin"),
        ("/opt/NVIDIA-Linux-x86_64-550", "/opt/NVIDIA-Linux-x86_64-550"),
    ],
)
def test_a_program_is_beside_the_libraries(tmp_path: Path, libraries: str, programs: str) -> None:
    """In the container it is where PATH leads; one on the host's PATH goes before."""
    tree = Tree(tmp_path / "root")
    tree.libraries(libraries)
    tree.file("/etc/ld.so.conf", f"{libraries}\n")
    path = f"{programs}/nvidia-smi"
    tree.file(path, elf(None), 0o755)
    assert paths(tree, "binary") == {"/usr/bin/nvidia-smi": path}
    said = fingerprint.plan(str(tree.path), str(tree.path))["programs"][1]
    assert f"{tree.path}{path}" in said
    tree.file("/usr/local/bin/nvidia-smi", elf(None), 0o755)
    assert paths(tree, "binary") == {"/usr/local/bin/nvidia-smi": "/usr/local/bin/nvidia-smi"}


@pytest.mark.parametrize("libraries", ["/usr/lib64", "/usr/lib/x86_64-linux-gnu/nvidia/current"])
def test_usual_libraries_add_no_place_for_programs(libraries: str) -> None:
    """The host is asked about each place in every create."""
    assert search_paths.programs_beside(libraries) == []
    assert search_paths.programs_beside("/") == []


@pytest.mark.parametrize("directory", ["/opt/bin", "/run/current-system/sw/bin"])
def test_a_program_outside_the_path_of_images_is_in_usr_bin(tree: Tree, directory: str) -> None:
    """The host's PATH has such a directory, and that of a container has not."""
    path = f"{directory}/nvidia-smi"
    tree.file(path, elf(None), 0o755)
    assert paths(tree, "binary") == {"/usr/bin/nvidia-smi": path}
    tree.file("/usr/sbin/nvidia-smi", elf(None), 0o755)
    assert paths(tree, "binary") == {"/usr/sbin/nvidia-smi": "/usr/sbin/nvidia-smi"}


def test_a_program_is_where_path_finds_it(tree: Tree) -> None:
    """One that is no program is passed over, a link keeps its name."""
    tree.file("/usr/local/bin/nvidia-smi", "notes")
    tree.link("/usr/bin/nvidia-smi", "/opt/driver/nvidia-smi")
    tree.file("/opt/driver/nvidia-smi", elf(None), 0o755)
    tree.file("/bin/nvidia-smi", elf(None), 0o755)
    tree.file("/usr/bin/nvidia-settings", elf(None), 0o755)
    assert paths(tree, "binary") == {"/usr/bin/nvidia-smi": "/opt/driver/nvidia-smi"}


@pytest.mark.parametrize(
    "directory",
    [
        "/usr/lib64/nvidia/xorg",
        "/usr/lib64/xorg/modules/drivers",
        "/usr/lib64/xorg/modules/extensions",
        "/usr/lib64/xorg/modules/updates/drivers",
        "/usr/lib/xorg/modules/drivers",
        "/usr/X11R6/lib64/modules/extensions",
    ],
)
def test_modules_of_xorg_are_found(directory: str, tree: Tree) -> None:
    """Of this machine's width; the extension is loaded by a name without version."""
    for name in ("nvidia_drv.so", f"libglxserver_nvidia.so.{VERSION}"):
        tree.file(f"{directory}/{name}", elf(None))
        tree.file(f"/usr/lib/xorg/modules/{name}", elf(None))
    wanted = [
        f"{directory}/{name}" for name in ("libglxserver_nvidia.so." + VERSION, "nvidia_drv.so")
    ]
    assert paths(tree, "xorg") == {path: path for path in wanted}
    link = f"libglxserver_nvidia.so.{VERSION}::{directory}/libglxserver_nvidia.so"
    assert link in gpu_edits.links(found(tree))


def test_modules_of_xorg_for_other_programs_are_passed_over(tree: Tree) -> None:
    """32-bit ones, and what is no module."""
    tree.file("/usr/lib64/xorg/modules/drivers/nvidia_drv.so", elf(None, abi="i386"))
    tree.file("/usr/lib/xorg/modules/drivers/nvidia_drv.so", "text")
    tree.file("/usr/lib64/nvidia/xorg/libglxserver_nvidia.so.535.1", elf(None))
    assert paths(tree, "xorg") == {}
    assert any("nvidia_drv.so" in problem for problem in found(tree).problems)


def test_modules_of_xorg_through_alternatives(tree: Tree) -> None:
    """Debian links names without versions."""
    modules = "/usr/lib/xorg/modules"
    private = "/usr/lib/nvidia/current"
    tree.file(f"{private}/nvidia_drv.so", elf(None))
    tree.file(f"{private}/libglxserver_nvidia.so.{VERSION}", elf(None))
    tree.link(f"{private}/libglxserver_nvidia.so", f"libglxserver_nvidia.so.{VERSION}")
    for kind, name in (
        ("drivers", "nvidia_drv.so"),
        ("extensions", "libglxserver_nvidia.so"),
    ):
        tree.link(f"{modules}/{kind}/{name}", f"/etc/alternatives/glx--{name}")
        tree.link(f"/etc/alternatives/glx--{name}", f"{private}/{name}")
    extension = f"libglxserver_nvidia.so.{VERSION}"
    assert paths(tree, "xorg") == {
        f"{modules}/drivers/nvidia_drv.so": f"{private}/nvidia_drv.so",
        f"{modules}/extensions/{extension}": f"{private}/{extension}",
    }


def test_what_nobody_has_linked_comes_where_debian_links_it(tmp_path: Path) -> None:
    """Unpacked packages, whose alternatives are not set."""
    tree = Tree(tmp_path / "root")
    place = "/usr/lib/x86_64-linux-gnu/nvidia/current"
    tree.libraries(place, flat=True)
    private = "/usr/lib/nvidia/current"
    tree.file(f"{place}/nvoptix.bin")
    tree.file(f"{private}/nvidia-smi", elf(None), 0o755)
    tree.file(f"{private}/nvidia_drv.so", elf(None))
    tree.file(f"{private}/libglxserver_nvidia.so.{VERSION}", elf(None))
    tree.file("/etc/nvidia/current/nvidia-drm-outputclass.conf")
    tree.file("/usr/lib/nvidia/tesla-470/nvidia-debugdump", elf(None), 0o755)
    assert {
        **paths(tree, "config"),
        **paths(tree, "binary"),
        **paths(tree, "xorg"),
    } == {
        "/usr/share/nvidia/nvoptix.bin": f"{place}/nvoptix.bin",
        "/usr/bin/nvidia-smi": f"{private}/nvidia-smi",
        "/usr/lib/xorg/modules/drivers/nvidia_drv.so": f"{private}/nvidia_drv.so",
        f"/usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.{VERSION}": (
            f"{private}/libglxserver_nvidia.so.{VERSION}"
        ),
        "/usr/share/X11/xorg.conf.d/nvidia-drm-outputclass.conf": (
            "/etc/nvidia/current/nvidia-drm-outputclass.conf"
        ),
    }


def test_libraries_for_wine_are_of_ngx(tree: Tree) -> None:
    """They lie beside the library that finds them."""
    tree.file(f"{LIBRARIES}/nvidia/wine/nvngx.dll")
    (file,) = (file for file in found(tree).files if file.container_path.endswith(".dll"))
    assert file.container_path == f"{LIBRARIES}/nvidia/wine/nvngx.dll"
    assert file.capability == "ngx"


@pytest.mark.parametrize(
    "directory",
    [
        "/lib/firmware",
        "/lib/firmware/updates",
        "/lib/firmware/6.1.0-28-amd64",
        "/lib/firmware/updates/6.1.0-28-amd64",
        "/usr/lib/firmware",
    ],
)
def test_firmware_of_the_version_is_found(directory: str, tree: Tree) -> None:
    """Where this kernel looks for it."""
    tree.firmware(directory)
    tree.file(f"{directory}/nvidia/535.1/gsp_ga10x.bin")
    tree.file("/lib/firmware/5.0.0/nvidia/{VERSION}/gsp_ga10x.bin")
    place = f"{directory}/nvidia/{VERSION}"
    assert list(paths(tree, "firmware")) == [f"{place}/gsp_ga10x.bin", f"{place}/gsp_tu10x.bin"]


@pytest.mark.parametrize("inside", [True, False])
def test_firmware_is_where_the_kernel_has_been_told(inside: bool, tree: Tree) -> None:
    """A driver container tells the host's kernel to look in it."""
    path = "/srv/firmware"
    told = f"{tree.path}{path}" if inside else path
    tree.file("/sys/module/firmware_class/parameters/path", f"{told}\n")
    tree.firmware(path)
    assert list(paths(tree, "firmware")) == [
        f"{path}/nvidia/{VERSION}/{name}" for name in ("gsp_ga10x.bin", "gsp_tu10x.bin")
    ]


def test_sockets_of_the_daemons_are_found(tree: Tree) -> None:
    """B027: a regular file of that name is none, nor is a link."""
    sockets(tree.path, "run/nvidia-persistenced/socket", "var/run/nvidia-fabricmanager/socket")
    assert list(paths(tree, "ipc")) == [
        "/run/nvidia-persistenced/socket",
        "/var/run/nvidia-fabricmanager/socket",
    ]
    tree.at("/run/nvidia-persistenced/socket").rename(tree.at("/run/other"))
    tree.link("/run/nvidia-persistenced/socket", "/run/other")
    tree.at("/var/run/nvidia-fabricmanager/socket").unlink()
    tree.file("/var/run/nvidia-fabricmanager/socket")
    assert paths(tree, "ipc") == {}


def test_the_directory_of_mps_is_found(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever computes needs it; where the operator says, if he does."""
    tree.directory("/tmp/nvidia-mps")
    (file,) = (file for file in found(tree).files if file.kind == "ipc")
    assert (file.container_path, file.capability) == ("/tmp/nvidia-mps", "compute")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/mps")
    assert paths(tree, "ipc") == {}
    tree.directory("/run/mps")
    assert paths(tree, "ipc") == {"/run/mps": "/run/mps"}


@pytest.mark.parametrize("name", ["relative", "/run/m p", "/run/../run/mps", "/run/mps\n", "/"])
def test_a_directory_of_mps_that_cannot_be_named_is_left_out(
    name: str, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be part of a spec."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", name)
    for path in ("/relative", "/run/m p", "/run/mps", "/run/mps\n"):
        tree.directory(path)
    assert paths(tree, "ipc") == {}


def test_what_anybody_can_make_in_tmp_is_no_directory_of_mps(tree: Tree) -> None:
    """A link there, mounted writable, would open whatever it leads to."""
    tree.directory("/etc/secret")
    tree.link("/tmp/nvidia-mps", "/etc/secret")
    assert paths(tree, "ipc") == {}
    tree.at("/tmp/nvidia-mps").unlink()
    tree.file("/tmp/nvidia-mps")
    assert paths(tree, "ipc") == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_mps_of_another_user_is_left_out_and_told(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the operator names it."""
    os.chown(tree.directory("/tmp/nvidia-mps"), 1000, 1000)
    assert paths(tree, "ipc") == {}
    assert any("belongs to uid 1000" in problem for problem in found(tree).problems)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    assert list(paths(tree, "ipc")) == ["/tmp/nvidia-mps"]


def test_sockets_are_writable_in_the_container(tree: Tree) -> None:
    """All else is not."""
    sockets(tree.path, "run/nvidia-persistenced/socket")
    tree.configs()
    edits = gpu_edits.common_edits(found(tree), (), (), gpu_edits.Style("/usr/bin/gpu-cdi-hook"))
    writable = [m["containerPath"] for m in edits["mounts"] if "ro" not in m["options"]]
    assert writable == ["/run/nvidia-persistenced/socket"]


def test_the_kinds_of_files_are_those_of_the_model(tree: Tree) -> None:
    """Who consumes them chooses by kind."""
    tree.configs()
    tree.programs()
    tree.firmware()
    tree.file("/usr/lib/xorg/modules/drivers/nvidia_drv.so", elf(None))
    tree.directory("/tmp/nvidia-mps")
    kinds = {file.kind for file in found(tree).files}
    assert kinds == {"binary", "config", "firmware", "xorg", "ipc"}
