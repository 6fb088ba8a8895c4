# SPDX-License-Identifier: Apache-2.0
"""The checks of `gpuruntime doctor`, which find faults of a host and change nothing."""
