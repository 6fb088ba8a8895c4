# SPDX-License-Identifier: Apache-2.0
"""The services of a compose file, as docker compose gives them to the engine.

Variables such as `${GPU:-0}` are replaced; files that a compose file names are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from gpuruntime.cli import explain_docker
from gpuruntime.cli import explain_values as values
from gpuruntime.cli.explain_candidate import IMAGE_NOTE, Candidate, Described
from gpuruntime.cli.explain_docker import EngineContainer
from gpuruntime.errors import RequestError
from gpuruntime.request.container import shortened

_VARIABLE = re.compile(
    r"\$(?:(\$)|([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)(?:(:?)([-+?])([^{}]*))?\})"
)
_SERVICES = "services"


def is_compose(document: object) -> bool:
    """Return whether *document* is a compose file."""
    return isinstance(document, dict) and isinstance(document.get(_SERVICES), dict)


def candidates(
    document: dict[str, Any], image_env: list[str], environ: Mapping[str, str]
) -> Iterator[Candidate]:
    """Return the services of *document*; *environ* are the caller's variables."""
    for name, service in document[_SERVICES].items():
        yield Candidate(
            name,
            f'service "{name}"',
            lambda name=name, service=service: Described.of_engine(  # type: ignore[misc]
                _container(
                    _interpolated(service, environ), f"{_SERVICES}.{name}", image_env, environ
                )
            ),
        )


def _container(
    service: object, where: str, image_env: list[str], environ: Mapping[str, str]
) -> EngineContainer:
    members = values.mapping(service, where)
    container = EngineContainer(
        env=_environment(members.get("environment"), f"{where}.environment", image_env, environ),
        privileged=values.flag(members.get("privileged"), f"{where}.privileged"),
        capabilities=values.texts(members.get("cap_add"), f"{where}.cap_add"),
        mounts=list(_mounts(members.get("volumes"), f"{where}.volumes")),
        annotations=_annotations(members.get("annotations"), f"{where}.annotations"),
        has_user_namespace=values.text(members.get("userns_mode"), where) not in ("", "host"),
        runtime=values.text(members.get("runtime"), f"{where}.runtime"),
    )
    if not image_env:
        container.notes.append(IMAGE_NOTE)
    container.notes += [
        f'"{name}" is not read' for name in ("env_file", "extends") if members.get(name)
    ]
    _add_devices(container, members.get("devices"), f"{where}.devices")
    for place, requests in _gpu_requests(members, where):
        for i, request in enumerate(requests):
            _add_request(container, request, f"{place}[{i}]")
    return container


def _gpu_requests(members: dict[str, Any], where: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield where devices are requested, and the requests there."""
    path = f"{where}.deploy.resources.reservations"
    deploy = values.mapping(members.get("deploy"), f"{where}.deploy")
    resources = values.mapping(deploy.get("resources"), f"{where}.deploy.resources")
    reservations = values.mapping(resources.get("reservations"), path)
    yield f"{path}.devices", values.items(reservations.get("devices"), f"{path}.devices")
    gpus = members.get("gpus")
    if isinstance(gpus, (str, int)) and not isinstance(gpus, bool):
        yield f"{where}.gpus", [{"count": gpus, "capabilities": ["gpu"]}]
    else:
        yield f"{where}.gpus", values.items(gpus, f"{where}.gpus")


def _add_request(container: EngineContainer, request: object, where: str) -> None:
    members = values.mapping(request, where)
    ids = values.texts(members.get("device_ids"), f"{where}.device_ids")
    count = values.text(members.get("count"), f"{where}.count")
    # Of the specification of compose: all, if neither says anything.
    explain_docker.add_gpu_request(
        container,
        driver=values.text(members.get("driver"), f"{where}.driver"),
        count=count or (None if ids else "all"),
        ids=ids,
        capabilities=values.texts(members.get("capabilities"), f"{where}.capabilities"),
        where=where,
    )


def _add_devices(container: EngineContainer, devices: object, where: str) -> None:
    for i, device in enumerate(values.items(devices, where)):
        place = f"{where}[{i}]"
        if isinstance(device, dict):
            device = device.get("source")  # noqa: PLW2901 (the long form of the same)
        explain_docker.add_device(container, values.text(device, place))


def _environment(
    value: object, where: str, image_env: list[str], environ: Mapping[str, str]
) -> list[str]:
    if isinstance(value, dict):
        # A name without a value is the caller's variable, as in a list.
        entries = [
            name if item is None else f"{name}={values.text(item, f'{where}.{name}')}"
            for name, item in value.items()
        ]
    else:
        entries = values.texts(value, where)
    return explain_docker.environment(image_env, entries, environ)


def _annotations(value: object, where: str) -> dict[str, str]:
    if isinstance(value, list):
        return {
            name: text
            for entry in values.texts(value, where)
            for name, _, text in [entry.partition("=")]
        }
    return values.pairs(value, where)


def _mounts(value: object, where: str) -> Iterator[dict[str, Any]]:
    for i, volume in enumerate(values.items(value, where)):
        place = f"{where}[{i}]"
        if isinstance(volume, dict):
            yield explain_docker.bind_mount(
                values.text(volume.get("source"), f"{place}.source"),
                values.text(volume.get("target"), f"{place}.target"),
            )
        else:
            yield explain_docker.volume_mount(values.text(volume, place), place)


def _interpolated(value: Any, environ: Mapping[str, str]) -> Any:  # noqa: ANN401 (YAML)
    """Return *value* with the caller's variables in its strings; raise RequestError."""
    if isinstance(value, str):
        return _VARIABLE.sub(lambda match: _replacement(match, environ), value)
    if isinstance(value, list):
        return [_interpolated(item, environ) for item in value]
    if isinstance(value, dict):
        return {name: _interpolated(item, environ) for name, item in value.items()}
    return value


def _replacement(match: re.Match[str], environ: Mapping[str, str]) -> str:
    if match[1]:
        return "$"
    name, colon, operator, word = match[2] or match[3], match[4], match[5], match[6]
    variable = environ.get(name)
    is_set = bool(variable) if colon else variable is not None
    if operator == "+":
        return word if is_set else ""
    if is_set or not operator:
        return variable or ""
    if operator == "?":
        raise RequestError(
            f'the variable "{shortened(name)}" of the compose file is not set',
            f"set it: {shortened(name)}=... gpuruntime explain FILE",
        )
    return word
