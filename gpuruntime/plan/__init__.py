# SPDX-License-Identifier: Apache-2.0
"""A request → the container edits that answer it: decided here, applied elsewhere."""
