# SPDX-License-Identifier: Apache-2.0
"""The table of distributions: how each is recognised, and where its driver's files are.

Discovery does not depend on it: every directory of `search_paths` is searched on every host. The
doctor names the distribution, and how the driver is installed there. Each *layout* is a miniature
root of tests/driver_roots.py. docs/reference/platforms.md has the same rows.
"""

from __future__ import annotations

from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

OS_RELEASE = ("/etc/os-release", "/usr/lib/os-release")
_OSTREE = "/run/ostree-booted"


class Distribution(Record):
    """A distribution: its *name*, the *ids* of its os-release file, and the test's *layout*.

    *libraries* and *programs* are where they are, in words. *install* is the action that installs
    the driver, "" if it is a package as on most distributions.
    """

    __slots__ = ("ids", "install", "layout", "libraries", "name", "programs")

    def __init__(
        self,
        name: str,
        *ids: str,
        layout: str,
        libraries: str,
        programs: str,
        install: str = "",
    ) -> None:
        self.name = name
        self.ids = ids
        self.layout = layout
        self.libraries = libraries
        self.programs = programs
        self.install = install


_USR_BIN = '"/usr/bin"'
# In the order in which they are recognised; a row without ids is an arrangement that any
# distribution can have.
DISTRIBUTIONS = (
    Distribution(
        *("Ubuntu", "ubuntu"),
        layout="ubuntu",
        libraries='"/usr/lib/x86_64-linux-gnu"',
        programs=_USR_BIN,
    ),
    Distribution(
        *("Debian", "debian"),
        layout="debian",
        libraries='"/usr/lib/x86_64-linux-gnu/nvidia/current", linked by alternatives',
        programs=_USR_BIN,
    ),
    Distribution(
        *("NixOS", "nixos"),
        layout="nixos",
        libraries='"/nix/store", linked from "/run/opengl-driver/lib"',
        programs='"origBin" beside "bin" in the store, where "/run/current-system/sw/bin" leads',
        install='set "hardware.graphics.enable" and "services.xserver.videoDrivers" in the '
        "configuration of NixOS",
    ),
    Distribution(
        *("Talos", "talos"),
        layout="talos",
        libraries='"/usr/local/glibc/usr/lib64" or "/usr/local/lib"',
        programs='"/usr/local/glibc/usr/bin" or "/usr/local/bin"',
        install="add the system extensions of the NVIDIA driver to the image of Talos",
    ),
    Distribution(
        *("Bottlerocket", "bottlerocket"),
        layout="bottlerocket",
        libraries="below the sys-root, which the loader cache names",
        programs='"libexec" beside "lib" of the libraries, or PATH',
        install="use a variant of Bottlerocket with the NVIDIA driver",
    ),
    Distribution(
        *("Container-Optimized OS", "cos"),
        layout="cos",
        libraries='"lib64" of the driver root "/home/kubernetes/bin/nvidia"',
        programs='"bin" of the driver root',
        install="let the driver installer of GKE or cos-extensions run on the node",
    ),
    Distribution(
        *("Flatcar", "flatcar"),
        layout="flatcar",
        libraries='"/opt/nvidia", which the configuration of the loader names',
        programs='"/opt/bin"',
        install="enable the NVIDIA driver of Flatcar in its Ignition configuration",
    ),
    Distribution(
        *("ostree systems", "fedora-coreos", "silverblue"),
        layout="ostree",
        libraries='"/usr/lib64"',
        programs=_USR_BIN,
        install='layer the package of the driver with "rpm-ostree install", and reboot',
    ),
    Distribution(
        *("SUSE", "suse", "opensuse", "sles"),
        layout="suse",
        libraries='"/usr/lib64", and directories that the configuration of the loader names',
        programs=_USR_BIN,
    ),
    Distribution(
        *("Gentoo", "gentoo"),
        layout="gentoo",
        libraries='"/usr/lib64"',
        programs='"/opt/bin" or "/usr/bin"',
    ),
    Distribution(
        *("Void", "void"),
        layout="void",
        libraries='"/usr/lib" and "/usr/lib32"',
        programs=_USR_BIN,
    ),
    Distribution(
        *("Alpine", "alpine"),
        layout="alpine",
        libraries='the directories of "/etc/ld-musl-MACHINE.path"',
        programs='"bin" beside "lib" of the libraries',
        install="install the driver with a C library of its own: it is not made for musl",
    ),
    Distribution(
        *("Arch", "arch", "archarm", "manjaro"),
        layout="arch",
        libraries='"/usr/lib" and "/usr/lib32"',
        programs=_USR_BIN,
    ),
    Distribution(
        *("RHEL and Fedora", "rhel", "fedora", "centos", "rocky", "almalinux", "amzn", "ol"),
        layout="rhel",
        libraries='"/usr/lib64", 32-bit in "/usr/lib"',
        programs=_USR_BIN,
    ),
    Distribution(
        "another directory",
        layout="cache-only",
        libraries="the directory that the loader cache names",
        programs=_USR_BIN,
    ),
    Distribution(
        "another prefix",
        layout="prefix",
        libraries="the directory that the configuration of the loader names",
        programs='"bin" beside "lib" of the libraries',
    ),
    Distribution(
        "driver in its own read-only tree",
        layout="own-tree",
        libraries='"lib64" of a tree such as "/usr/local/nvidia", also linked from "/usr/lib"',
        programs='"bin" of that tree, which scripts in "/usr/bin" start',
    ),
    Distribution(
        "another driver root",
        layout="opt",
        libraries='"lib64" of "--driver-root"',
        programs='"bin" of "--driver-root"',
    ),
)


def of_host(
    read: Callable[[str], str | None], exists: Callable[[str], bool]
) -> Distribution | None:
    """Return the distribution of the host, None if it is not in the table.

    *read* returns the text of a file, None if it cannot be read; *exists* says whether there is
    one.
    """
    text = next(filter(None, map(read, OS_RELEASE)), "")
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    words = [
        word
        for key in ("VARIANT_ID", "ID", "ID_LIKE")
        for word in values.get(key, "").strip("\"' ").split()
    ]
    if exists(_OSTREE):
        words = ["silverblue"]
    for word in words:
        for row in DISTRIBUTIONS:
            if word in row.ids:
                return row
    return None
