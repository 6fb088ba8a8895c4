# SPDX-License-Identifier: Apache-2.0
"""GPU knowledge, the OCI shim and the command line."""

__version__ = "0.1.0"
