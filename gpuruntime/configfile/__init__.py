# SPDX-License-Identifier: Apache-2.0
"""The file config.toml: its options, its text, its check, its compilation for the start path."""
