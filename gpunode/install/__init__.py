# SPDX-License-Identifier: Apache-2.0
"""Put our OCI runtime on a host, register it with the engine, and remove both again."""
