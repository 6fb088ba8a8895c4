# SPDX-License-Identifier: Apache-2.0
"""The OCI side of the shim: the runtime's command line, the bundle, the low-level runtime."""
