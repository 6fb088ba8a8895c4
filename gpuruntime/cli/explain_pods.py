# SPDX-License-Identifier: Apache-2.0
"""The containers of Kubernetes objects: pods, pod templates of other objects, lists of them; pure.

The device plugin or the DRA driver chooses the devices of a pod when it starts. For a number of
GPUs, the first ones stand in for those.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpuruntime.cli import explain_docker
from gpuruntime.cli import explain_values as values
from gpuruntime.cli.explain_candidate import IMAGE_NOTE, Candidate, Described
from gpuruntime.cli.explain_docker import EngineContainer
from gpuruntime.errors import RequestError
from gpuruntime.request import parse
from gpuruntime.request.container import shortened

# Resources that a device plugin offers for whole GPUs, or for shares of them.
_GPUS = ("nvidia.com/gpu", "nvidia.com/gpu.shared")
_RESOURCES = "nvidia.com/"
_CDI_PREFIX = "cdi.k8s.io/"
_MAX_LISTS = 8
_CONTAINERS = ("containers", "initContainers", "ephemeralContainers")


def is_object(document: object) -> bool:
    """Return whether *document* is an object of Kubernetes."""
    return isinstance(document, dict) and "kind" in document and "apiVersion" in document


def candidates(documents: list[dict[str, Any]], image_env: list[str]) -> Iterator[Candidate]:
    """Return the containers of all *documents*."""
    for one in _objects(documents, 0):
        kind = values.text(one.get("kind"), "kind")
        metadata = values.mapping(one.get("metadata"), f"{kind}.metadata")
        name = values.text(metadata.get("name"), f"{kind}.metadata.name") or kind.lower()
        pod, where = _pod(one, kind)
        if pod is None:
            continue
        spec = values.mapping(pod.get("spec"), f"{where}.spec")
        for member in _CONTAINERS:
            place = f"{where}.spec.{member}"
            for i, container in enumerate(values.items(spec.get(member), place)):
                members = values.mapping(container, f"{place}[{i}]")
                own = values.text(members.get("name"), f"{place}[{i}].name")
                yield Candidate(
                    f"{name}/{own}",
                    f'container "{own}" of the {kind} "{name}"',
                    lambda pod=pod, members=members, place=f"{place}[{i}]": (  # type: ignore[misc]
                        Described.of_engine(_container(pod, members, place, image_env))
                    ),
                    aliases=(own,),
                )


def _objects(documents: list[Any], depth: int) -> Iterator[dict[str, Any]]:
    """Yield *documents* and the items of those that are lists."""
    for document in documents:
        one = values.mapping(document, "an item of a list")
        if isinstance(one.get("items"), list) and depth < _MAX_LISTS:
            yield from _objects(one["items"], depth + 1)
        else:
            yield one


def _pod(one: dict[str, Any], kind: str) -> tuple[dict[str, Any] | None, str]:
    """Return the pod or the pod template of an object and where it is; None if it has none."""
    if kind in ("Pod", ""):
        return one, kind or "Pod"
    holder: Any = one
    where = kind
    for path in (("template",), ("spec", "template"), ("spec", "jobTemplate", "spec", "template")):
        holder = one
        for member in path:
            holder = holder.get(member) if isinstance(holder, dict) else None
        if isinstance(holder, dict):
            return holder, ".".join((where, *path))
    return None, where


def _container(
    pod: dict[str, Any], members: dict[str, Any], where: str, image_env: list[str]
) -> EngineContainer:
    spec = values.mapping(pod.get("spec"), "spec")
    metadata = values.mapping(pod.get("metadata"), "metadata")
    context = values.mapping(members.get("securityContext"), f"{where}.securityContext")
    capabilities = values.mapping(context.get("capabilities"), f"{where}.capabilities")
    container = EngineContainer(
        privileged=values.flag(context.get("privileged"), f"{where}.privileged"),
        capabilities=values.texts(capabilities.get("add"), f"{where}.capabilities.add"),
        mounts=list(_mounts(spec, members, where)),
        annotations=values.pairs(metadata.get("annotations"), "metadata.annotations"),
        has_user_namespace=spec.get("hostUsers") is False,
        runtime=values.text(spec.get("runtimeClassName"), "spec.runtimeClassName"),
    )
    if not image_env:
        container.notes.append(IMAGE_NOTE)
    if any(name.startswith(_CDI_PREFIX) for name in container.annotations):
        container.notes.append(
            "annotations of a pod count if the engine resolves them itself, or passes them on to "
            "the runtime"
        )
    variables = _variables(members, where, container.notes)
    resources = values.mapping(members.get("resources"), f"{where}.resources")
    variables += _allocated(resources, where, container.notes)
    container.env = explain_docker.environment(image_env, variables, {})
    return container


def _variables(members: dict[str, Any], where: str, notes: list[str]) -> list[str]:
    entries = []
    for i, variable in enumerate(values.items(members.get("env"), f"{where}.env")):
        place = f"{where}.env[{i}]"
        entry = values.mapping(variable, place)
        name = values.text(entry.get("name"), f"{place}.name")
        if entry.get("valueFrom") is not None:
            notes.append(f'the value of the variable "{shortened(name)}" is not in the file')
        else:
            entries.append(f"{name}={values.text(entry.get('value'), f'{place}.value')}")
    if members.get("envFrom"):
        notes.append('the variables of "envFrom" are not in the file')
    return entries


def _allocated(resources: dict[str, Any], where: str, notes: list[str]) -> list[str]:
    """Return the variable that a device plugin would set for *resources*."""
    amounts = {
        # A limit without a request is the request, too.
        **values.mapping(resources.get("requests"), f"{where}.resources.requests"),
        **values.mapping(resources.get("limits"), f"{where}.resources.limits"),
    }
    variables: list[str] = []
    for name, amount in amounts.items():
        count = values.text(amount, f"{where}.resources.limits")
        if not name.startswith(_RESOURCES) or count in ("", "0"):
            continue
        if name not in _GPUS:
            notes.append(
                f'the device plugin chooses {shortened(count)} of "{shortened(name)}" when the '
                "pod starts"
            )
            continue
        ids = explain_docker.gpu_variables(count, None, (), f'the limit "{name}"')
        variables = ids
        notes.append(
            f'the device plugin chooses the GPUs for {count} of "{name}" when the pod starts: '
            f"{parse.VISIBLE_DEVICES}={ids[0].partition('=')[2]} stands in for them here"
        )
    if resources.get("claims"):
        notes.append("the DRA driver chooses the devices of the resource claims")
    return variables


def _mounts(spec: dict[str, Any], members: dict[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """Yield the mounts of paths of the host."""
    sources = {}
    for i, volume in enumerate(values.items(spec.get("volumes"), "spec.volumes")):
        entry = values.mapping(volume, f"spec.volumes[{i}]")
        host_path = values.mapping(entry.get("hostPath"), f"spec.volumes[{i}].hostPath")
        if host_path:
            name = values.text(entry.get("name"), f"spec.volumes[{i}].name")
            sources[name] = values.text(host_path.get("path"), f"spec.volumes[{i}].hostPath.path")
    for i, mount in enumerate(values.items(members.get("volumeMounts"), f"{where}.volumeMounts")):
        place = f"{where}.volumeMounts[{i}]"
        entry = values.mapping(mount, place)
        source = sources.get(values.text(entry.get("name"), f"{place}.name"))
        if source is not None:
            target = values.text(entry.get("mountPath"), f"{place}.mountPath")
            yield explain_docker.bind_mount(source, target)


def no_container(documents: list[dict[str, Any]], path: str) -> RequestError:
    """Return the error for objects without a container."""
    kinds = dict.fromkeys(shortened(str(one.get("kind"))) for one in documents)
    return RequestError(
        f'"{path}" has no container: it has objects of kind {", ".join(list(kinds)[:8])}',
        "give a pod, or an object with a pod template such as a Deployment",
    )
