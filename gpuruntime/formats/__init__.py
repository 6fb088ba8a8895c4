# SPDX-License-Identifier: Apache-2.0
"""File formats of the loader, of ELF, of driver versions; pure: bytes and text in, values out."""
