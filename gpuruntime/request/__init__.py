# SPDX-License-Identifier: Apache-2.0
"""Read what a container asks for, and may have: OCI config → request; pure."""
