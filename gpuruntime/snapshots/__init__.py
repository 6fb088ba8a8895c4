# SPDX-License-Identifier: Apache-2.0
"""Results that are computed once and reused by later creates: files below /run/gpuruntime."""

RUN_DIRECTORY = "/run/gpuruntime"
