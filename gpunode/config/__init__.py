# SPDX-License-Identifier: Apache-2.0
"""The config file of the device plugin, version v1, its flags and environment variables."""
