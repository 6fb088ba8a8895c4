# SPDX-License-Identifier: Apache-2.0
"""File formats: ELF, loader cache, CUDA note, driver version; pure: bytes in, values out."""
