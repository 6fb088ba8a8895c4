# SPDX-License-Identifier: Apache-2.0
"""What containers ask for by their environment: name of a case → variables."""

from __future__ import annotations

CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
REQUESTS: dict[str, tuple[str, ...]] = {
    **{
        f"devices-{number:02}": (f"{VISIBLE}={value}",)
        for number, value in enumerate(
            (
                *("all", "none", "void", "", "0", "1,0", "0,0", " 0 , 1 ", "0,,1", "9", "x", "-1"),
                *("all,0", "none,0", "void,0", "0:0", "1:0", "1:1", "1:9", "00", "0000:1a:00.0"),
                *("GPU-5f1e0000-9a3c-4d27-8b60-0c1d2e3f4a00", "GPU-5f1e0000", "GPU-unknown"),
                *("MIG-3a7c0010-51d2-5e0b-9f14-0b2a3c4d5e01", "nvidia.com/gpu=0"),
                *("nvidia.com/gpu=all", "nvidia.com/gpu=9", "nvidia.com/gpu=0,1", "other.org/x=1"),
                *("runtime.nvidia.com/gpu=0", "management.nvidia.com/gpu=all", "a\tb", "ü", "0\n"),
                *("nvidia.com/gpu=0,nvidia.com/gpu=1", "nvidia.com/pgpu=0", "k8s.device/gpu=0"),
            )
        )
    },
    **{
        f"capabilities-{number:02}": (f"{VISIBLE}=0", f"{CAPABILITIES}={value}")
        for number, value in enumerate(
            (
                *("all", "", "compute", "utility", "graphics", "video", "display", "ngx"),
                *("compat32", "compute,utility", "utility,compute", "none", "unknown"),
                *("compute,unknown", "all,compute", " compute , video "),
            )
        )
    },
    **{
        f"requirement-{number:02}": (f"{VISIBLE}=0", *env)
        for number, env in enumerate(
            (
                ("NVIDIA_REQUIRE_CUDA=cuda>=12.0",),
                ("NVIDIA_REQUIRE_CUDA=cuda>=99.0",),
                ("NVIDIA_REQUIRE_CUDA=cuda>=99.0", "NVIDIA_DISABLE_REQUIRE=true"),
                ("NVIDIA_REQUIRE_CUDA=cuda>=99.0 driver>=550",),
                ("NVIDIA_REQUIRE_DRIVER=driver<535",),
                ("NVIDIA_REQUIRE_ARCH=arch>=9.0", "NVIDIA_REQUIRE_BRAND=brand=tesla"),
                ("NVIDIA_REQUIRE_CUDA=nonsense",),
                ("NVIDIA_REQUIRE_CUDA=cuda>=",),
                ("CUDA_VERSION=12.2.0",),
                ("CUDA_VERSION=99.0.0",),
            )
        )
    },
    **{
        f"feature-{number:02}": (f"{VISIBLE}=0", *env)
        for number, env in enumerate(
            (
                ("NVIDIA_GDS=enabled",),
                ("NVIDIA_MOFED=enabled", "NVIDIA_GDRCOPY=enabled"),
                ("NVIDIA_NVSWITCH=enabled",),
                ("NVIDIA_GDS=1",),
                ("NVIDIA_IMEX_CHANNELS=0",),
                ("NVIDIA_IMEX_CHANNELS=0,10",),
                ("NVIDIA_IMEX_CHANNELS=all",),
                ("NVIDIA_IMEX_CHANNELS=7",),
                ("NVIDIA_MIG_CONFIG_DEVICES=all",),
                ("NVIDIA_MIG_MONITOR_DEVICES=all",),
                ("NVIDIA_CTK_LIBCUDA_DIR=/x",),
            )
        )
    },
    "old-image": ("CUDA_VERSION=9.0",),
    "old-image-without": ("CUDA_VERSION=9.0", f"{VISIBLE}="),
    "two-values": (f"{VISIBLE}=0", f"{VISIBLE}=1"),
    "swarm": ("DOCKER_RESOURCE_GPU=1",),
    "unasked": (),
}
