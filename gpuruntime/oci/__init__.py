# SPDX-License-Identifier: Apache-2.0
"""The low-level runtime's command line, a bundle's config.json, and the low-level runtime itself.

The shim uses all three, the hooks read config.json. The meaning of a config is not defined here.
"""
