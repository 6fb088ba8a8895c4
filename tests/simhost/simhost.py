#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run a command on a simulated GPU host: `simhost.py run [--gpus N] [--fault F] -- CMD…`.

The command sees eight H100s, driver 550, its libraries in /usr and its nodes in /dev, in mount,
PID and cgroup namespaces of its own. When the command ends, or when this program is killed, every
process started inside ends too and nothing of it remains on the machine. SIMHOST, SIMHOST_ROOT
(the driver root) and SIMHOST_CONF (what the fake NVML reads, see fakenvml.c) are set for it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import artefacts
import cgroups
import fakeproc
import kernelside
import mig_layout
import namespace
import supervisor
from artefacts import SimhostError


def main(arguments: list[str] | None = None, program: Callable[[], int] | None = None) -> int:
    """Run the command line and return the exit status of the command run.

    *program* is called in place of the command, in its process.
    """
    options = _parser().parse_args(arguments)
    try:
        if options.action == "fakeproc":
            if options.bundle is None:
                print(artefacts.fakeproc_hook())
            else:
                fakeproc.add(options.bundle)
            return 0
        return run(options, program)
    except SimhostError as error:
        print(f"simhost: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="simhost.py", description=__doc__.split("\n")[0])
    actions = parser.add_subparsers(dest="action", required=True)
    run_parser = actions.add_parser("run", help="run a command on the simulated host")
    run_parser.add_argument("--gpus", type=int, default=8, help="how many GPUs (default 8)")
    run_parser.add_argument("--version", default=artefacts.DEFAULT_VERSION, help="driver version")
    run_parser.add_argument("--layout", choices=["debian"], default="debian")
    run_parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="FAULT",
        help='"init-fails [CODE]", "init-hangs", "lost GPU", "mig-lost GPU INDEX", "nobusid GPU", '
        '"fails FUNCTION CODE [GPU]", "initdelay_us N" of NVML; "nosymbol FUNCTION": NVML lacks '
        'it; "nonode PATTERN", "no-mig-minors", "no-capabilities", "bound GPU DRIVER" (another '
        "kernel driver has the GPU) of the kernel; repeatable",
    )
    run_parser.add_argument(
        "--mig",
        action="append",
        default=[],
        metavar="GPU:COUNT|PROFILES",
        help='this GPU ("all": each) is in MIG mode with COUNT devices, 0 to 7, or with those '
        'of PROFILES, such as "3g.40gb,1g.10gb"; repeatable',
    )
    run_parser.add_argument(
        "--numa",
        action="append",
        default=[],
        metavar="GPU:NODE",
        help="this GPU's NUMA node, -1 for none; repeatable",
    )
    run_parser.add_argument(
        "--nvml",
        action="append",
        default=[],
        metavar="LINE",
        help='a further line for NVML, such as "nvlink 0 1 4" or "at 5 xid 0 79": see '
        "docs/development/simulated-host.md; repeatable",
    )
    run_parser.add_argument(
        "--gpu-name",
        action="append",
        default=[],
        metavar="GPU:NAME",
        help="this GPU's product name, \\xNN for odd bytes; repeatable",
    )
    run_parser.add_argument(
        "--gpu-arch",
        action="append",
        default=[],
        metavar="GPU:MAJOR.MINOR",
        help="this GPU's compute capability (default 9.0); repeatable",
    )
    run_parser.add_argument(
        "--gpu-brand",
        action="append",
        default=[],
        metavar="GPU:NUMBER",
        help="this GPU's brand in NVML's numbers (default 14, NVIDIA); repeatable",
    )
    run_parser.add_argument(
        "--cuda",
        type=int,
        default=0,
        metavar="NUMBER",
        help="newest CUDA of the driver, 12040 for 12.4 (default: by its version)",
    )
    run_parser.add_argument(
        "--feature",
        action="append",
        default=[],
        choices=list(kernelside.FEATURES),
        help="has its device nodes; repeatable",
    )
    run_parser.add_argument("--modify-device-files", type=int, choices=[0, 1], default=1)
    run_parser.add_argument(
        "--driver-root", type=Path, help='a real user space, from "make driver-root"'
    )
    run_parser.add_argument(
        "--separate-root", action="store_true", help="keep the driver root apart from /"
    )
    run_parser.add_argument("command", nargs="+", metavar="CMD")
    hook_parser = actions.add_parser(
        "fakeproc",
        help="add the createRuntime hook that shows /proc/driver to BUNDLE, or print its path",
    )
    hook_parser.add_argument("bundle", nargs="?", type=Path, metavar="BUNDLE")
    return parser


def run(options: argparse.Namespace, program: Callable[[], int] | None = None) -> int:
    """Run the command on the host that *options* describe and return its exit status.

    *program* is called in place of the command. A command ended by signal N gives 128 + N, one
    that is not found 127.
    """
    if os.geteuid() != 0:
        raise SimhostError("the simulated host needs root", "run it with sudo")
    if "SIMHOST" in os.environ:
        raise SimhostError("this is a simulated host already", "run the command by itself")
    if not 1 <= options.gpus <= kernelside.MAX_GPUS:
        raise SimhostError(
            f"cannot simulate {options.gpus} GPUs", f"ask for 1 to {kernelside.MAX_GPUS}"
        )
    names = dict(_of_gpu("--gpu-name", word, options.gpus) for word in options.gpu_name)
    migs = _mig_profiles(options.mig, options.gpus)
    if options.driver_root is not None:
        tree = options.driver_root.resolve()
        version = _real_version(tree)
    else:
        version = options.version
        tree = artefacts.driver_tree(version)
    driver = namespace.Driver(
        tree, artefacts.fake_nvml(), artefacts.nvidia_smi(), separate=options.separate_root
    )
    host = kernelside.plan_host(
        version,
        options.gpus,
        modify_device_files=bool(options.modify_device_files),
        names=names,
        migs=migs,
        faults=options.fault,
        features=options.feature,
        facts=_facts(options),
    )

    def enter(groups: list[cgroups.Hierarchy]) -> dict[str, str]:
        inside = namespace.enter(host, driver, groups)
        return {
            "SIMHOST": "1",
            "SIMHOST_ROOT": str(inside.root),
            "SIMHOST_CONF": str(inside.conf),
        }

    return supervisor.run(program or options.command, enter, cgroups.SIMHOST)


def _real_version(root: Path) -> str:
    """Return the version of the driver that "make driver-root" has unpacked in *root*."""
    import fetch_driver  # noqa: PLC0415 (most hosts have a simulated driver)

    try:
        return fetch_driver.driver_version(root)
    except fetch_driver.FetchError as error:
        raise SimhostError(str(error)) from None


def _of_gpu(option: str, word: str, gpus: int) -> tuple[int, str]:
    """Return index and value of *word*, `GPU:VALUE`."""
    index, colon, value = word.partition(":")
    if not (colon and index.isdecimal() and int(index) < gpus):
        raise SimhostError(f'{option} "{word}" is not GPU:VALUE of one of {gpus} GPUs')
    return int(index), value


def _facts(options: argparse.Namespace) -> kernelside.Facts:
    """Return what the options say of CUDA, and of what GPUs are."""
    archs = dict(_of_gpu("--gpu-arch", word, options.gpus) for word in options.gpu_arch)
    brands = dict(_of_gpu("--gpu-brand", word, options.gpus) for word in options.gpu_brand)
    if not all(re.fullmatch(r"[0-9]+\.[0-9]+", arch) for arch in archs.values()):
        raise SimhostError("--gpu-arch is not GPU:MAJOR.MINOR")
    if not all(brand.isdecimal() for brand in brands.values()):
        raise SimhostError("--gpu-brand is not GPU:NUMBER")
    numa = dict(_of_gpu("--numa", word, options.gpus) for word in options.numa)
    if not all(re.fullmatch(r"-1|[0-9]+", node) for node in numa.values()):
        raise SimhostError("--numa is not GPU:NODE")
    return kernelside.Facts(
        options.cuda,
        archs,
        {gpu: int(number) for gpu, number in brands.items()},
        {gpu: int(node) for gpu, node in numa.items()},
        tuple(options.nvml),
    )


def _mig_profiles(words: list[str], gpus: int) -> dict[int, list[str]]:
    """Return the profiles of the MIG devices of each GPU in MIG mode."""
    profiles = {}
    for word in words:
        every = range(gpus) if word.startswith("all:") else None
        index, value = _of_gpu("--mig", word.replace("all:", "0:", 1) if every else word, gpus)
        names = value.split(",")
        if value.isdecimal():
            names = [kernelside.USUAL_PROFILE] * int(value)
        if len(names) > kernelside.MAX_MIGS:
            raise SimhostError(f'--mig "{word}" is not GPU:COUNT, COUNT 0 to 7')
        mig_layout.place(names)
        profiles.update(dict.fromkeys(every or (index,), names))
    return profiles


if __name__ == "__main__":
    sys.exit(main())
