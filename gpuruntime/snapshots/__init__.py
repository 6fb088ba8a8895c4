# SPDX-License-Identifier: Apache-2.0
"""What is computed once and read by later creates: files below /run/gpuruntime."""
