# SPDX-License-Identifier: Apache-2.0
"""What `gpuruntime explain` makes of files of engines and of Kubernetes, and of bad input."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from cdi import yaml_text, yamlio
from gpuruntime.cli import explain_input
from gpuruntime.cli.explain_candidate import Described
from gpuruntime.errors import RequestError

VISIBLE = "NVIDIA_VISIBLE_DEVICES"
CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"
CDI = "nvidia.com/gpu=0"
HOOK = "/usr/bin/nvidia-container-runtime-hook"


def described(
    data: object,
    container: str | None = None,
    *image_env: str,
    **environ: str,
) -> Described:
    """Return the container *container* of *data*, which is text or is written as JSON."""
    text = data if isinstance(data, str) else json.dumps(data)
    found = explain_input.candidate("file", text.encode(), container, image_env, environ)
    assert found is not None
    return found.describe()


def env(found: Described) -> list[str]:
    """Return the environment of a container."""
    entries: list[str] = found.config["process"]["env"]
    return entries


def is_privileged(found: Described) -> bool:
    """Return whether a container counts as privileged."""
    return "CAP_SYS_ADMIN" in found.config["process"]["capabilities"]["bounding"]


def mounts(found: Described) -> list[tuple[str, str]]:
    """Return source and destination of the mounts of a container."""
    return [(mount["source"], mount["destination"]) for mount in found.config["mounts"]]


def has_prestart(found: Described) -> bool:
    """Return whether a container has the prestart hook of docker's GPU requests."""
    hooks = found.config.get("hooks", {}).get("prestart", [])
    return [hook["path"] for hook in hooks] == [HOOK]


def inspected(**host: Any) -> dict[str, Any]:
    """Return what `docker inspect` prints of a container, with these members of HostConfig."""
    return {
        "Id": "0123456789abcdef0123456789abcdef",
        "Name": "/train",
        "Config": {"Env": [f"{VISIBLE}=all", "PATH=/bin"]},
        "HostConfig": {"Runtime": "nvidia", "CapAdd": None, "DeviceRequests": None, **host},
        "Mounts": [{"Type": "bind", "Source": "/dev/null", "Destination": "/x"}],
    }


def gpu_request(**members: Any) -> dict[str, Any]:
    """Return a device request of docker's API."""
    return {
        "Driver": "",
        "Count": 0,
        "DeviceIDs": None,
        "Capabilities": [["gpu"]],
        **members,
    }


def test_docker_inspect() -> None:
    """The variables, mounts and rights that the engine was asked for."""
    found = described([inspected(Privileged=True, UsernsMode="private")])
    assert env(found) == [f"{VISIBLE}=all", "PATH=/bin"]
    assert mounts(found) == [("/dev/null", "/x")]
    assert is_privileged(found)
    assert {"type": "user"} in found.config["linux"]["namespaces"]
    assert not has_prestart(found)
    assert found.notes == ['the engine starts it with the runtime "nvidia"']
    assert not is_privileged(described([inspected()]))
    assert is_privileged(described([inspected(CapAdd=["CAP_SYS_ADMIN"])]))


@pytest.mark.parametrize(
    ("request_", "variables", "devices"),
    [
        (gpu_request(Count=-1), [f"{VISIBLE}=all"], []),
        (gpu_request(Count=2), [f"{VISIBLE}=0,1"], []),
        (gpu_request(DeviceIDs=["1", "GPU-a"]), [f"{VISIBLE}=1,GPU-a"], []),
        (
            gpu_request(Count=1, Capabilities=[["gpu", "video"]]),
            [f"{VISIBLE}=0", f"{CAPABILITIES}=video"],
            [],
        ),
        (gpu_request(Driver="cdi", DeviceIDs=[CDI]), None, [CDI]),
        (gpu_request(Driver="amd", Count=1), None, []),
    ],
)
def test_gpu_requests_of_docker(
    request_: dict[str, Any], variables: list[str] | None, devices: list[str]
) -> None:
    """As `docker run --gpus` and `--device` of a CDI name make them."""
    found = described([inspected(DeviceRequests=[request_])])
    assert env(found)[2:] == (variables or [])
    assert has_prestart(found) == (variables is not None)
    assert found.devices == devices


def test_a_runtime_that_adds_no_gpu_is_noted() -> None:
    """The variables of a container with runc have no effect."""
    (note,) = described([inspected(Runtime="runc")]).notes
    assert 'the runtime "runc", which adds no GPU' in note
    assert described([inspected(Runtime="runc", DeviceRequests=[gpu_request()])]).notes == []


def test_podman_inspect() -> None:
    """Podman has its runtime and its rights elsewhere, and CDI names in the command line alone."""
    one = {
        **inspected(Runtime="oci"),
        "OCIRuntime": "/usr/bin/crun",
        "OCIConfigPath": "/run/containers/x/userdata/config.json",
        "BoundingCaps": ["CAP_CHOWN", "CAP_SYS_ADMIN"],
    }
    command = ["podman", "run", "--device", CDI, "--device=nvidia.com/gpu=1", "--device", "/dev/x"]
    one["Config"] = {"Env": [], "CreateCommand": command, "Annotations": {"a": "b"}}
    found = described([one])
    assert found.devices == [CDI, "nvidia.com/gpu=1"]
    assert is_privileged(found)
    assert found.config["annotations"] == {"a": "b"}
    assert 'its config.json is "/run/containers/x/userdata/config.json"' in found.notes[0]


def test_an_image_is_its_variables() -> None:
    """`docker inspect IMAGE` has no HostConfig."""
    image = {
        "Id": "sha256:0123456789abcdef",
        "RepoTags": ["cuda:12"],
        "Config": {"Env": [f"{VISIBLE}=all"]},
    }
    found = described([image])
    assert env(found) == [f"{VISIBLE}=all"]
    assert "this is an image" in found.notes[0]


@pytest.mark.parametrize("wrap", [lambda c: {"info": {"runtimeSpec": c}}, lambda c: {"Spec": c}])
def test_an_oci_config_in_what_an_engine_prints(wrap: Any) -> None:
    """`crictl inspect` and `ctr container info` have it whole."""
    config = {"ociVersion": "1.1.0", "process": {"env": ["A=b"]}}
    assert described(wrap(config)).config == config


COMPOSE = f"""
x-defaults: &defaults
  runtime: nvidia
  cap_add: [SYS_ADMIN]
services:
  list:
    <<: *defaults
    cap_add: []
    environment: ["{VISIBLE}=${{GPU:-1}}", HOME, UNSET]
    annotations: [cdi.k8s.io/x=y]
    volumes: ["/dev/null:/a:ro", {{type: bind, source: /b, target: /c}}, name:/d]
  map:
    <<: *defaults
    environment: {{{VISIBLE}: 0, HOME: null, FLAG: true, PRICE: $$5}}
    annotations: {{k: v}}
    userns_mode: keep-id
    env_file: x.env
  reserved:
    deploy:
      resources:
        reservations:
          devices:
            - {{driver: nvidia, capabilities: [gpu, utility]}}
  counted:
    deploy: {{resources: {{reservations: {{devices: [{{count: 2, capabilities: [gpu]}}]}}}}}}
  named:
    deploy:
      resources:
        reservations:
          devices: [{{driver: nvidia, device_ids: ['0', '3'], capabilities: [gpu]}}]
  gpus: {{gpus: all}}
  some: {{gpus: [{{driver: nvidia, count: 1}}]}}
  cdi:
    privileged: true
    devices: ["{CDI}", /dev/nvidia0:/dev/nvidia0, {{source: nvidia.com/gpu=1}}]
  cdi-driver:
    gpus: [{{driver: cdi, device_ids: ["{CDI}"]}}]
"""


def test_the_environment_of_a_service() -> None:
    """As a list or a map; variables of the caller, of the image, and in the text."""
    found = described(COMPOSE, "list", f"{VISIBLE}=all", "UNSET=1", HOME="/h", GPU="2")
    assert env(found) == [f"{VISIBLE}=2", "HOME=/h"]
    assert found.config["annotations"] == {"cdi.k8s.io/x": "y"}
    assert mounts(found) == [("/dev/null", "/a"), ("/b", "/c"), ("name", "/d")]
    assert not is_privileged(found)
    assert env(described(COMPOSE, "list"))[0] == f"{VISIBLE}=1"
    found = described(COMPOSE, "map", HOME="/h")
    assert env(found) == [f"{VISIBLE}=0", "HOME=/h", "FLAG=true", "PRICE=$5"]
    assert is_privileged(found)
    assert {"type": "user"} in found.config["linux"]["namespaces"]
    assert '"env_file" is not read' in found.notes
    assert any("--image-env" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("reserved", [f"{VISIBLE}=all", f"{CAPABILITIES}=utility"]),
        ("counted", [f"{VISIBLE}=0,1"]),
        ("named", [f"{VISIBLE}=0,3"]),
        ("gpus", [f"{VISIBLE}=all"]),
        ("some", [f"{VISIBLE}=0"]),
    ],
)
def test_gpus_of_a_service(name: str, variables: list[str]) -> None:
    """Each of the ways that compose has."""
    found = described(COMPOSE, name)
    assert env(found) == variables
    assert has_prestart(found)


def test_cdi_devices_of_a_service() -> None:
    """The engine adds them; a device node alone brings no driver."""
    found = described(COMPOSE, "cdi")
    assert found.devices == [CDI, "nvidia.com/gpu=1"]
    assert any('"/dev/nvidia0", without the driver' in note for note in found.notes)
    assert is_privileged(found)
    assert described(COMPOSE, "cdi-driver").devices == [CDI]


def test_a_variable_that_a_compose_file_requires() -> None:
    """Compose stops as well."""
    text = "services: {a: {environment: ['A=${B:?}']}}"
    assert env(described(text, B="1")) == ["A=1"]
    with pytest.raises(RequestError, match='the variable "B"'):
        described(text)


PODS = f"""
apiVersion: v1
kind: Service
metadata: {{name: front}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: serve}}
spec:
  template:
    metadata: {{annotations: {{cdi.k8s.io/x: {CDI}}}}}
    spec:
      runtimeClassName: nvidia
      hostUsers: false
      volumes:
        - {{name: ask, hostPath: {{path: /dev/null}}}}
        - {{name: other, emptyDir: {{}}}}
      initContainers: [{{name: init}}]
      containers:
        - name: main
          env:
            - {{name: {CAPABILITIES}, value: all}}
            - {{name: SECRET, valueFrom: {{}}}}
          envFrom: [{{}}]
          resources: {{limits: {{nvidia.com/gpu: 2, nvidia.com/mig-1g.10gb: 1, cpu: 1}}}}
          securityContext: {{privileged: true}}
          volumeMounts: [{{name: ask, mountPath: /a}}, {{name: other, mountPath: /b}}]
"""


def test_a_deployment_among_other_documents() -> None:
    """The device plugin's choice is assumed, and a note says so."""
    found = described(PODS, "main", f"{VISIBLE}=none")
    assert env(found) == [f"{VISIBLE}=0,1", f"{CAPABILITIES}=all"]
    assert found.config["annotations"] == {"cdi.k8s.io/x": CDI}
    assert mounts(found) == [("/dev/null", "/a")]
    assert is_privileged(found)
    assert {"type": "user"} in found.config["linux"]["namespaces"]
    notes = "\n".join(found.notes)
    assert f"{VISIBLE}=0,1 stands in for them" in notes
    assert '1 of "nvidia.com/mig-1g.10gb"' in notes
    assert 'the variable "SECRET"' in notes
    assert '"envFrom"' in notes
    assert "annotations of a pod" in notes
    assert '"nvidia"' in notes
    assert env(described(PODS, "serve/init")) == []


POD = {"containers": [{"name": "c", "env": [{"name": "A", "value": "b"}]}]}
TEMPLATE = {"spec": POD}


@pytest.mark.parametrize(
    "document",
    [
        {"kind": "Pod", "spec": POD},
        {"kind": "List", "items": [{"kind": "Pod", "spec": POD}]},
        {"kind": "PodList", "items": [{"spec": POD}]},
        {"kind": "PodTemplate", "template": TEMPLATE},
        *(
            {"kind": kind, "spec": {"template": TEMPLATE}}
            for kind in ("DaemonSet", "StatefulSet", "ReplicaSet", "Job")
        ),
        {"kind": "CronJob", "spec": {"jobTemplate": {"spec": {"template": TEMPLATE}}}},
    ],
    ids=lambda document: document["kind"],
)
def test_pods_wherever_they_are(document: dict[str, Any]) -> None:
    """The only container needs no name; JSON is what `kubectl -o json` prints."""
    found = described({"apiVersion": "v1", **document})
    assert env(found) == ["A=b"]
    text = yaml_text.encode({"apiVersion": "v1", **document})
    assert env(described(text)) == ["A=b"]


def refused(data: bytes | object, container: str | None = None) -> str:
    """Return the message for *data*, which has a hint."""
    written = data if isinstance(data, bytes) else json.dumps(data).encode()
    error = error_of(written, container)
    assert error is not None
    assert error.hint
    assert "\n" not in error.message
    return error.message


def error_of(data: bytes, container: str | None) -> RequestError | None:
    """Return why *container* of *data* cannot be explained; None if it can."""
    try:
        found = explain_input.candidate("file", data, container, (), {})
        if found is not None:
            found.describe()
    except RequestError as error:
        return error
    return None


def test_one_of_several_containers_is_chosen_by_name() -> None:
    """By its name or, where only one has it, a shorter one; the error lists the names."""
    message = refused(COMPOSE.encode())
    assert message.startswith('"file" has 9 containers: "list", "map", ')
    assert refused(COMPOSE.encode(), "x") == '"file" has no container "x"'
    two = [inspected(), {**inspected(), "Name": "/other", "Id": "ff" * 16}]
    assert refused(two).endswith('2 containers: "train", "other"')
    assert env(described(two, "ff" * 6)) == env(described(two, "other"))
    pods = [
        {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": name}, "spec": POD}
        for name in ("a", "b")
    ]
    listed = {"kind": "List", "apiVersion": "v1", "items": pods}
    assert refused(listed, "c") == '"file" has several containers "c"'
    assert env(described(listed, "b/c")) == ["A=b"]
    many = {"services": {f"s{i}": {} for i in range(1000)}}
    assert refused(many).endswith(" and 980 more")


@pytest.mark.parametrize(
    "data",
    [
        b'{"ociVersion": "1.1.0"}',
        b" \n{}",
        b'{"process": {"env": []}}',
        b'{"a": 1',
        b'{"a": ' + b"[" * 100_000,
        b'{"services": []}',
        b'{"Config": {}}',
    ],
)
def test_other_objects_are_left_to_the_reader_of_config_json(data: bytes) -> None:
    """It accepts or refuses them as the runtime does."""
    assert explain_input.candidate("file", data, None, (), {}) is None


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "it is empty"),
        (b"\xef\xbb\xbf \n", "it is empty"),
        (b"--- \n---\n", "it is empty"),
        (b"\x7fELF\x02\x01\x01\x00\xff", "byte 8 is not valid UTF-8"),
        (b"\x00\x00", "not valid YAML"),
        (b"a: b: c", "not valid YAML: line 1"),
        (b"just words", "no container is described"),
        (b"[]", "not the output of an inspect command"),
        (b"[{}", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" + b"[]," * 600_000 + b"[]]", "more than 500000 values"),
        (b"version: '3'\n", "no container is described"),
        (b"services: {}", "it has no container"),
        (b"services: 7", "no container is described"),
        (b"apiVersion: v1\nkind: Service", "it has objects of kind Service"),
        (b"apiVersion: v1\nkind: Pod\n---\njust words", "no container is described"),
        (b"a: &a [*a]", "contains itself"),
        (b"x: *nothing", "is not defined"),
        (b"x: {" * 2000, "not valid YAML"),
    ],
)
def test_input_that_describes_no_container(data: bytes, said: str) -> None:
    """One line, and a hint that lists what can be given."""
    assert said in refused(data)


@pytest.mark.parametrize(
    "text",
    [
        "- a\n" * 2_500_000,
        "services:\n" + "".join(f"  s{i}: {{}}\n" for i in range(700_000)),
        "a: &a [x]\n" + "".join(f"a{i}: &a [{'*a,' * 9}*a]\n" for i in range(20)),
        "a: &a {k: &k v}\n" + "".join(f"a{i}: &a {{<<: [*a,*a], k{i}: *a}}\n" for i in range(40)),
        "x: " + "1" * (10 << 20),
        "x: '" + "y" * (10 << 20) + "'",
    ],
    ids=["list", "map", "aliases", "merges", "number", "string"],
)
def test_large_yaml_ends_in_time(text: str) -> None:
    """In proportion to the limit on values, not to what aliases and merges amount to."""
    start = time.process_time()
    refused(text.encode())
    assert time.process_time() - start < 30


SERVICES = ("list", "map", "reserved", "named", "gpus", "some", "cdi")
ODD = (True, 7, 1.5, "x", [], [None], [[]], [7], ["x"], {}, {"x": 7}, [{}], [{"x": [1]}])


def odd(document: Any) -> list[Any]:
    """Return copies of *document* with an odd value in place of each of its values."""
    found: list[Any] = []
    if isinstance(document, dict):
        for name, value in document.items():
            found += [{**document, name: one} for one in (*ODD, None, *odd(value))]
    elif isinstance(document, list):
        for i, value in enumerate(document):
            found += [
                [*document[:i], one, *document[i + 1 :]] for one in (*ODD, None, *odd(value))
            ]
    return found


@pytest.mark.parametrize(
    "document",
    [
        [
            {
                **inspected(DeviceRequests=[gpu_request(DeviceIDs=["0"])], Devices=[{}]),
                "Config": {"Env": [], "CreateCommand": ["--device", "x"], "Annotations": {}},
            }
        ],
        *yamlio.decode_documents(PODS)[1:],
        {"services": yamlio.decode_documents(COMPOSE)[0]["services"]},  # type: ignore[index]
    ],
    ids=["inspect", "pods", "compose"],
)
def test_odd_values_are_errors_of_ours(document: Any) -> None:
    """Wherever a value of another type is."""
    for one in odd(document):
        data = json.dumps(one).encode()
        errors = [error_of(data, name) for name in (None, "train", "main", *SERVICES)]
        assert all(error is None or error.hint for error in errors)


def test_options_without_effect_are_refused() -> None:
    """A name for the container of a config.json, variables of an image that are there."""
    config = b'{"ociVersion": "1.1.0"}'
    for data, container, image_env, option in (
        (config, "x", (), "--container"),
        (config, None, ("A=b",), "--image-env"),
        (json.dumps([inspected()]).encode(), None, ("A=b",), "--image-env"),
    ):
        with pytest.raises(RequestError, match=f'"{option}" has no effect'):
            explain_input.candidate("file", data, container, image_env, {})
