# SPDX-License-Identifier: Apache-2.0
"""Container engines: edit their config files so that they know our runtime, and undo that."""
