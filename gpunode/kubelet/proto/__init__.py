# SPDX-License-Identifier: Apache-2.0
"""The messages of the kubelet's gRPC interfaces; `make protos` generates the modules."""
