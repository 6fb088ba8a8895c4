# SPDX-License-Identifier: Apache-2.0
"""The services of a Kubernetes node with GPUs: the program `gpu-node`.

The flow has one direction: `watch` observes the driver and sends values of `model`; pure modules
(`devices`, `allocation`, `health`, ...) derive from them what is published; `kubelet` and `api`
publish; `services` connect the three.
"""
