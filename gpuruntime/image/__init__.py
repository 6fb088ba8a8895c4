# SPDX-License-Identifier: Apache-2.0
"""What an image needs of the driver, and why its GPU work would fail here; executes nothing."""
