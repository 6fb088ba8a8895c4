# SPDX-License-Identifier: Apache-2.0
"""Touch the machine; the only package that may import ctypes."""
