# SPDX-License-Identifier: Apache-2.0
"""GPUs in containers: launcher, OCI runtime, discovery, engine configuration, command line."""

__version__ = "0.1.0"
