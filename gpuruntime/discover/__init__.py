# SPDX-License-Identifier: Apache-2.0
"""Read the machine into an inventory; never writes."""
