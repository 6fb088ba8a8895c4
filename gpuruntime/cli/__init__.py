# SPDX-License-Identifier: Apache-2.0
"""The command line for people; one module a command group."""
