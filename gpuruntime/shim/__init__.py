# SPDX-License-Identifier: Apache-2.0
"""The OCI runtime in front of the low-level runtime."""
