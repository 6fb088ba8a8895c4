# SPDX-License-Identifier: Apache-2.0
"""Names under which the kernel lists character devices that no GPU has; pure data.

A node of a GPU with the number of one of these has been left behind by a driver that had the
number before, or has been made by hand. Loaded only if a node's driver is not the expected one.
"""

from __future__ import annotations

NAMES = frozenset(
    (
        # Fixed numbers: Documentation/admin-guide/devices.txt of Linux.
        *("mem", "tty", "ttyS", "ttyprintk", "lp", "vcs", "misc", "input", "sg", "st", "osst"),
        *("fb", "sound", "video4linux", "i2c", "ppdev", "ppp", "alsa", "ptm", "pts", "usb"),
        *("usb_device", "raw", "cpu/msr", "cpu/cpuid", "ttyMAX", "rfcomm", "spi", "ipmidev"),
        *("/dev/vc/0", "/dev/tty", "/dev/console", "/dev/ptmx", "ttyUSB", "ttyACM", "hvc", "drm"),
        # Numbers that the kernel assigns: alloc_chrdev_region and register_chrdev of Linux.
        *("accel", "aux", "bsg", "cec", "dax", "dma_heap", "fpga_region", "gpiochip", "hidraw"),
        *("iio", "infiniband_mad", "infiniband_verbs", "kfd", "lirc", "media", "mei", "mtd"),
        *("ndctl", "dimmctl", "nvme", "nvme-generic", "pps", "ptp", "remoteproc", "roccat"),
        *("rpmb", "rtc", "tpm", "ttyDBC", "ttyGS", "ubi0", "usbmon", "vfio", "watchdog"),
        *("megaraid_sas_ioctl", "aac", "megadev_legacy", "switchtec", "cxl", "iommufd", "uio"),
    )
)
