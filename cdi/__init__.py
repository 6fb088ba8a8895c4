# SPDX-License-Identifier: Apache-2.0
"""The Container Device Interface, vendor-neutral: documents, names, edits, spec directories."""
