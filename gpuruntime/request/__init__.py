# SPDX-License-Identifier: Apache-2.0
"""What a container asks for, and may have: its OCI config → a request; pure."""
