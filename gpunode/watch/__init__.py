# SPDX-License-Identifier: Apache-2.0
"""Observe the driver: one child process asks NVML, its parent has a deadline for each answer."""
