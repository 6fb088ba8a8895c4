# SPDX-License-Identifier: Apache-2.0
"""Decide what a container gets: a request → container edits, which others apply."""
