# SPDX-License-Identifier: Apache-2.0
"""The reasons for a request: what in the container, or in the config, decides it; pure."""

from __future__ import annotations

from gpuruntime import config as settings
from gpuruntime.config import Config
from gpuruntime.request import driver_options, parse, requirements
from gpuruntime.request.container import Container, shown
from gpuruntime.request.parse import Request


def mode(asked: Request, config: Config) -> tuple[str, str]:
    """Return the mode of *asked*, or that of a request if there were one, and why `auto` is it."""
    if config.mode != settings.AUTO:
        return asked.mode or config.mode, ""
    if not asked.devices:
        return asked.mode or settings.JIT, "auto: no qualified name is asked for"
    how = "all" if asked.mode == settings.CDI else "not all"
    return asked.mode, f"auto: {how} names are qualified"


def asked_by(asked: Request, container: Container) -> str:
    """Return what of the container asks for the devices."""
    if asked.source == parse.ANNOTATIONS:
        prefixes = container.config.annotation_prefixes
        keys = sorted(key for key in container.document["annotations"] if key.startswith(prefixes))
        return f"annotations {shown(keys)}"
    if asked.source == parse.MOUNTS:
        return f"mounts {shown(container.mount_names())}"
    if asked.source == parse.IMAGE:
        version = container.value("CUDA_VERSION")
        return f"CUDA_VERSION={shown([version])} without {parse.VISIBLE_DEVICES}: an old image"
    swarm = [name for name in container.config.swarm if name in container.environment]
    names = swarm or [parse.VISIBLE_DEVICES]
    return ", ".join(f"{name}={shown([container.value(name)])}" for name in names)


def nothing(asked: Request, container: Container) -> str:
    """Return why the container asks for nothing, or for nothing that counts."""
    names = [name for name in container.config.swarm if name in container.environment]
    name = names[0] if names else parse.VISIBLE_DEVICES
    words = container.words(name)
    if asked.ignored:
        return "what asks for any does not count"
    if name not in container.environment:
        return f"{name} is not set, and nothing else asks for any"
    if "void" in words:
        return f'{name} is "void": the devices have been added already, or are not wanted'
    if not words:
        return f"{name} is empty, which asks for nothing"
    return f"{name}={shown([container.value(name)])} does not count"


def capabilities(asked: Request, container: Container) -> str:
    """Return what decides over the driver capabilities."""
    variable = driver_options.DRIVER_CAPABILITIES
    if not asked.is_automatic:
        return f"those of the CDI spec, whatever {variable} says"
    key = "nvidia-container-runtime.modes.jit-cdi.driver-capabilities"
    if container.config[key] == "all" and asked.mode != settings.LEGACY:
        return f'"{key}" is "all"'
    if container.words(variable):
        return f"{variable}={shown([container.value(variable)])}"
    if variable not in container.environment and container.is_old_image:
        return "an image of an old CUDA has all"
    return f"{variable} is {'empty' if variable in container.environment else 'not set'}"


def requirements_off(asked: Request, container: Container) -> str:
    """Return why requirements of the image are not checked, "" if they are or there are none."""
    written = any(name.startswith(driver_options.REQUIRE) for name in container.environment)
    if asked.extras.requirements or not (written or container.is_old_image):
        return ""
    if not asked.is_automatic:
        return "not checked in the mode cdi"
    if container.config["disable-require"]:
        return 'not checked: "disable-require" is set'
    if requirements.is_true(container.value(driver_options.DISABLE_REQUIRE)):
        return f"not checked: {driver_options.DISABLE_REQUIRE} is set"
    return ""
