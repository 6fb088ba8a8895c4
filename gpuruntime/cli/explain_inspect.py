# SPDX-License-Identifier: Apache-2.0
"""Containers in the output of `docker inspect`, `podman inspect`, `crictl inspect`, `ctr`; pure.

Docker and podman print what the engine was asked for, the others the OCI config itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cdi import names
from gpuruntime.cli import explain_docker
from gpuruntime.cli import explain_values as values
from gpuruntime.cli.explain_candidate import Candidate, Described
from gpuruntime.cli.explain_docker import EngineContainer
from gpuruntime.request.container import shortened

_ID_CHARS = 12


def is_inspected(document: object) -> bool:
    """Return whether *document* is the output of an inspect command."""
    if isinstance(document, list):
        return bool(document) and all(map(_is_one, document))
    return _is_one(document) or _embedded(document) is not None


def candidates(document: Any) -> Iterator[Candidate]:  # noqa: ANN401 (JSON)
    """Return the containers, and the images, of *document*."""
    embedded = _embedded(document)
    if embedded is not None:
        yield Candidate("", "the container", lambda: Described(embedded))
        return
    for one in document if isinstance(document, list) else [document]:
        identity = values.text(one.get("Id"), "Id")
        if "HostConfig" in one or "OCIRuntime" in one:
            name = values.text(one.get("Name"), "Name").removeprefix("/") or identity
            yield Candidate(
                name,
                f'container "{name}"',
                lambda one=one: Described.of_engine(_container(one)),  # type: ignore[misc]
                aliases=(identity, identity[:_ID_CHARS]),
            )
        else:
            tags = values.texts(one.get("RepoTags"), "RepoTags")
            name = tags[0] if tags else identity
            yield Candidate(
                name,
                f'image "{name}"',
                lambda one=one: Described.of_engine(_image(one)),  # type: ignore[misc]
                aliases=(*tags, identity, identity.removeprefix("sha256:")[:_ID_CHARS]),
            )


def _is_one(document: object) -> bool:
    return isinstance(document, dict) and "Config" in document and "Id" in document


def _embedded(document: object) -> dict[str, Any] | None:
    """Return the OCI config in what crictl or ctr print of a container; None if there is none."""
    if not isinstance(document, dict):
        return None
    info = document.get("info")
    config = info.get("runtimeSpec") if isinstance(info, dict) else document.get("Spec")
    return config if isinstance(config, dict) and "ociVersion" in config else None


def _container(one: dict[str, Any]) -> EngineContainer:
    config = values.mapping(one.get("Config"), "Config")
    host = values.mapping(one.get("HostConfig"), "HostConfig")
    container = EngineContainer(
        env=values.texts(config.get("Env"), "Config.Env"),
        privileged=values.flag(host.get("Privileged"), "HostConfig.Privileged"),
        capabilities=[
            *values.texts(host.get("CapAdd"), "HostConfig.CapAdd"),
            *values.texts(one.get("BoundingCaps"), "BoundingCaps"),
        ],
        mounts=list(_mounts(one)),
        annotations={
            **values.pairs(config.get("Annotations"), "Config.Annotations"),
            **values.pairs(host.get("Annotations"), "HostConfig.Annotations"),
        },
        has_user_namespace=values.text(host.get("UsernsMode"), "HostConfig.UsernsMode")
        not in ("", "host"),
        # Podman's HostConfig has the word "oci" alone.
        runtime=values.text(one.get("OCIRuntime"), "OCIRuntime")
        or values.text(host.get("Runtime"), "HostConfig.Runtime"),
    )
    config_path = values.text(one.get("OCIConfigPath"), "OCIConfigPath")
    if config_path:
        container.notes.append(
            f'its config.json is "{shortened(config_path)}": "--config-json" explains what it has'
        )
    requests = values.items(host.get("DeviceRequests"), "HostConfig.DeviceRequests")
    for i, request in enumerate(requests):
        _add_request(container, request, f"HostConfig.DeviceRequests[{i}]")
    # Podman keeps CDI names nowhere else.
    words = values.texts(config.get("CreateCommand"), "Config.CreateCommand")
    container.devices += _cdi_options(words)
    for i, device in enumerate(values.items(host.get("Devices"), "HostConfig.Devices")):
        where = f"HostConfig.Devices[{i}]"
        path = values.text(values.mapping(device, where).get("PathOnHost"), where)
        explain_docker.add_device(container, path)
    return container


def _add_request(container: EngineContainer, request: object, where: str) -> None:
    members = values.mapping(request, where)
    ids = values.texts(members.get("DeviceIDs"), f"{where}.DeviceIDs")
    count = values.text(members.get("Count"), f"{where}.Count")
    words = [
        word
        for i, alternative in enumerate(
            values.items(members.get("Capabilities"), f"{where}.Capabilities")
        )
        for word in values.texts(alternative, f"{where}.Capabilities[{i}]")
    ]
    explain_docker.add_gpu_request(
        container,
        driver=values.text(members.get("Driver"), f"{where}.Driver"),
        # Docker writes 0 where there are ids.
        count=None if ids else count or None,
        ids=ids,
        capabilities=words,
        where=where,
    )


def _cdi_options(words: list[str]) -> list[str]:
    """Return the CDI names that the options of podman's command line *words* name."""
    devices = []
    for i, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option == "--device":
            name = value if equals else next(iter(words[i + 1 :]), "")
            if names.is_qualified(name):
                devices.append(name)
    return devices


def _mounts(one: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for i, mount in enumerate(values.items(one.get("Mounts"), "Mounts")):
        where = f"Mounts[{i}]"
        members = values.mapping(mount, where)
        yield explain_docker.bind_mount(
            values.text(members.get("Source"), f"{where}.Source"),
            values.text(members.get("Destination"), f"{where}.Destination"),
        )


def _image(one: dict[str, Any]) -> EngineContainer:
    config = values.mapping(one.get("Config"), "Config")
    return EngineContainer(
        env=values.texts(config.get("Env"), "Config.Env"),
        notes=["this is an image: a container of it may request other devices"],
    )
