# SPDX-License-Identifier: Apache-2.0
"""The OCI side of the shim: command line, bundle, device nodes, low-level runtime."""
