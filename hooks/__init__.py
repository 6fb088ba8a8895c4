# SPDX-License-Identifier: Apache-2.0
"""Programs that the low-level runtime runs around container start."""
