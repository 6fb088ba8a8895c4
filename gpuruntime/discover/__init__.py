# SPDX-License-Identifier: Apache-2.0
"""Read the machine into an inventory: driver files, GPUs, device nodes; never writes."""
