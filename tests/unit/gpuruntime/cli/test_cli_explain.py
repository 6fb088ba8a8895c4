# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime explain` without a GPU: what it can be given, what it makes of that, bad input."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked_cli
import pytest

from gpuruntime.cli import explain_docker, explain_report, explain_text
from gpuruntime.cli.explain import Text
from gpuruntime.cli.explain_docker import Options
from gpuruntime.cli.explain_reasons import Reason
from gpuruntime.cli.explain_report import Input
from gpuruntime.errors import GpuRuntimeError, RequestError

# Each test starts the command line, most of them several times.
pytestmark = pytest.mark.slow

VISIBLE = "NVIDIA_VISIBLE_DEVICES"
SPEC = {
    "cdiVersion": "0.5.0",
    "kind": "nvidia.com/gpu",
    "devices": [
        {"name": name, "containerEdits": {"env": [f"GPU_{name}=1"]}} for name in ("0", "1", "all")
    ],
    "containerEdits": {"env": [f"{VISIBLE}=void"]},
}
MOUNT = "/var/run/nvidia-container-devices"
MEMBERS = {
    *(
        "container",
        "mode",
        "config",
        "source",
        "devices",
        "capabilities",
        "requirements",
        "edits",
        "removed",
    ),
    *("reasons", "ignored", "warnings", "notes", "runtime", "error"),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a directory with CDI specs and a config.toml of the mode cdi, which names them."""
    specs = tmp_path / "cdi"
    specs.mkdir()
    (specs / "nvidia.json").write_text(json.dumps(SPEC))
    (tmp_path / "config.toml").write_text(
        '[nvidia-container-runtime]\nmode = "cdi"\nruntimes = ["/bin/true"]\n'
        f'[nvidia-container-runtime.modes.cdi]\nspec-dirs = ["{specs}"]\n'
    )
    return tmp_path


def run(
    place: Path, *arguments: str, given: bytes | int = b"", **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run `gpuruntime explain` with *arguments* and what is *given*: bytes, or a descriptor."""
    variables = {"PATH": "/usr/bin:/bin", "GPURUNTIME_CONFIG": str(place / "config.toml")}
    return forked_cli.run(
        "explain", *arguments, given=given, cwd=place, env={**variables, **environ}
    )


def told(place: Path, *arguments: str, given: bytes = b"", **environ: str) -> dict[str, Any]:
    """Return the object that is printed; the exit status and standard error agree with it."""
    done = run(place, "--json", *arguments, given=given, **environ)
    found: dict[str, Any] = json.loads(done.stdout)
    assert set(found) == MEMBERS
    error = found["error"]
    assert done.returncode == (0 if error is None else 1)
    if error is None:
        assert done.stderr == ""
    else:
        assert set(error) == {"message", "hint", "phase"}
        assert all(error.values())
        assert re.fullmatch(r"error: [a-z]+: [ -~]+\nhint: [ -~]+\n", done.stderr), done.stderr
        assert found["edits"] == {}
    return found


def oci(*env: str, **members: Any) -> bytes:
    """Return the bytes of an OCI config."""
    return json.dumps({"ociVersion": "1.0.2", "process": {"env": [*env]}, **members}).encode()


def written(path: Path) -> tuple[int, int, int]:
    """Return what changes when *path* is written."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


@pytest.mark.parametrize(
    "arguments",
    [(), ("-",), ("--config-json", "-"), ("config.json",), ("--bundle", "."), ("-b", "")],
)
def test_a_config_json_from_wherever_it_is(place: Path, arguments: tuple[str, ...]) -> None:
    """A bundle, a file, standard input."""
    data = oci(f"{VISIBLE}=1")
    (place / "config.json").write_bytes(data)
    before = written(place / "config.json")
    found = told(place, *arguments, given=data)
    assert found["mode"] == "cdi"
    assert found["source"] == "environment"
    assert found["devices"] == ["nvidia.com/gpu=1"]
    assert found["edits"] == {"env": [f"{VISIBLE}=void", "GPU_1=1"]}
    assert found["config"] == str(place / "config.toml")
    assert found["runtime"] == "/bin/true"
    assert (found["ignored"], found["error"]) == ([], None)
    assert written(place / "config.json") == before
    assert sorted(os.listdir(place)) == ["cdi", "config.json", "config.toml"]


def test_options_like_docker_s(place: Path) -> None:
    """--env goes before --image-env, and a name alone is the caller's."""
    image = ("--image-env", f"{VISIBLE}=all")
    assert told(place, *image)["devices"] == ["nvidia.com/gpu=all"]
    assert told(place, *image, "--env", f"{VISIBLE}=0")["devices"] == ["nvidia.com/gpu=0"]
    assert told(place, *image, "-e", VISIBLE, **{VISIBLE: "1"})["devices"] == ["nvidia.com/gpu=1"]
    assert told(place, *image, "-e", VISIBLE)["devices"] == []
    annotation = ("--annotation", "cdi.k8s.io/x=nvidia.com/gpu=0")
    found = told(place, *annotation, *image)
    assert (found["source"], found["devices"]) == ("annotations", ["nvidia.com/gpu=0"])
    assert [item["what"] for item in found["ignored"]] == [f'{VISIBLE} "all"']
    found = told(place, "-v", f"/dev/null:{MOUNT}/0")
    assert found["devices"] == []
    (ignored,) = found["ignored"]
    assert set(ignored) == {"what", "why"}
    assert "accept-nvidia-visible-devices-as-volume-mounts" in ignored["why"]


def test_the_operator_s_policy(place: Path) -> None:
    """What an unprivileged container may not, a privileged one may; and it is told so."""
    policy = place / "policy.toml"
    policy.write_text(
        "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"
        "accept-nvidia-visible-devices-as-volume-mounts = true\n"
        + (place / "config.toml").read_text()
    )
    asking = ("--config", str(policy), "-e", f"{VISIBLE}=1")
    found = told(place, *asking)
    assert (found["devices"], found["edits"], len(found["ignored"])) == ([], {}, 1)
    assert found["config"] == str(policy)
    assert told(place, *asking, "--cap-add", "SYS_ADMIN")["devices"] == ["nvidia.com/gpu=1"]
    found = told(place, *asking, "--privileged")
    assert found["devices"] == ["nvidia.com/gpu=1"]
    assert "privileged" in found["warnings"][0]
    mount = ("--mount", f"type=bind,source=/dev/null,target={MOUNT}/0,readonly")
    assert told(place, *asking, *mount)["devices"] == ["nvidia.com/gpu=0"]


def test_the_mode_can_be_another(place: Path) -> None:
    """To see what changing it would do, before it is changed."""
    asking = ("-e", f"{VISIBLE}=nvidia.com/gpu=0")
    assert told(place, *asking, "--mode", "auto")["mode"] == "cdi"
    found = told(place, *asking, "--mode", "bogus")
    assert (found["mode"], found["error"]["phase"]) == ("bogus", "configuration")
    assert str(place) not in found["error"]["message"]
    text = run(place, *asking, "--mode", "auto").stdout
    assert re.search("^mode +cdi: auto: all names are qualified$", text, re.MULTILINE)


def test_nothing_asked_for_is_no_error(place: Path) -> None:
    """And the reason is told: a variable that is not set, empty, void, or refused."""
    for arguments, why in (
        (("--image-env", "A=b"), "nothing in config.json requests a device"),
        (("--image-env", "NVIDIA_A=b"), f"{VISIBLE} is not set"),
        (("-e", f"{VISIBLE}="), f"{VISIBLE} is empty"),
        (("-e", f"{VISIBLE}=void"), 'is "void", which requests no device'),
    ):
        found = told(place, *arguments)
        assert (found["devices"], found["edits"], found["error"]) == ([], {}, None)
        assert why in found["reasons"][-1]["why"]
        assert re.search(f"^nothing .*{why}", run(place, *arguments).stdout, re.MULTILINE)


def test_a_spec_that_is_not_used_is_named(place: Path) -> None:
    """Also beside an error about a device that is not there."""
    (place / "cdi" / "broken.json").write_text("{")
    for name in ("0", "7"):
        found = told(place, "-e", f"{VISIBLE}={name}")
        assert len([note for note in found["notes"] if "broken.json" in note]) == 1
    assert found["devices"] == ["nvidia.com/gpu=7"]
    assert found["error"]["phase"] == "device"
    assert 'defines "nvidia.com/gpu=7"' in found["error"]["message"]


def test_devices_of_the_engine(place: Path) -> None:
    """The engine adds them itself; what they say of the devices counts here already."""
    found = told(place, "--device", "nvidia.com/gpu=0", "--image-env", f"{VISIBLE}=all")
    assert (found["devices"], found["edits"]) == ([], {})
    assert 'the engine itself adds "nvidia.com/gpu=0"' in found["notes"][0]
    for name in ("nvidia.com/gpu=9", "/dev/null", ""):
        error = told(place, "--device", name)["error"]
        assert error["phase"] == ("device" if "=" in name else "request")


def test_a_runtime_that_is_not_found_is_a_warning(place: Path) -> None:
    """The engine's PATH may be another than that of whoever asks."""
    config = place / "config.toml"
    config.write_text(config.read_text().replace("/bin/true", "no-such-runtime"))
    found = told(place, "-e", f"{VISIBLE}=0")
    assert (found["runtime"], found["error"]) == (None, None)
    assert "no-such-runtime" in found["warnings"][0]


def test_a_config_file_that_cannot_be_used(place: Path) -> None:
    """The runtime does not start either."""
    (place / "bad.toml").write_text("swarm-resource = 7\n")
    for name in ("bad.toml", "no-such.toml", "."):
        found = told(place, "--config", name, "-e", f"{VISIBLE}=0")
        assert found["error"]["phase"] == "configuration"
        assert found["config"] == name
    (place / "unknown.toml").write_text("what = 7\n")
    found = told(place, "--config", "unknown.toml", "--image-env", "A=b")
    assert "what" in found["warnings"][0]
    assert told(place, "--image-env", "A=b", GPURUNTIME_CONFIG="")["config"] in (
        *(None, "/etc/gpuruntime/config.toml", "/etc/nvidia-container-runtime/config.toml"),
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "it is empty"),
        (b"[]", "not the output of an inspect command"),
        (b'{"a": NaN}', "JSON object"),
        (b"{" * 100_000, "JSON object"),
        (b'{"NVIDIA_": ' + b"[" * 100_000, "nested too deeply"),
        (b"{" + b" " * (64 << 20), "larger than 16777216 bytes"),
        (b'{"NVIDIA_": 1, "process": 7}', "process is not an object"),
        (b'{"process": {"env": "NVIDIA_"}}', "not a list of strings"),
        (b'{"process": {"env": ["NVIDIA_A=\xff"]}}', "not valid UTF-8"),
        (b'{"process": {"env": ["NVIDIA_A=b"], "env": []}}', "appears twice"),
        (oci(f"{VISIBLE}=0", "WHAT"), "invalid environment variable: process.env[1], of 4"),
        (oci(f"{VISIBLE}=\x1b[31m\n"), "defines"),
        (oci(f"{VISIBLE}={'0,' * 70_000}"), "characters"),
        (oci(f"{VISIBLE}=0", "X=\ud800"), "a lone surrogate"),
    ],
)
def test_bytes_that_are_no_config(place: Path, data: bytes, said: str) -> None:
    """An error that says what is wrong, in a line, and an object all the same."""
    found = told(place, given=data)
    assert said in found["error"]["message"]
    assert "bug" not in found["error"]["message"]


def test_files_that_are_no_config(place: Path) -> None:
    """Missing, a directory, a FIFO nobody writes to, a link, a name that no file can have."""
    os.mkfifo(place / "fifo")
    (place / "link").symlink_to("config.json")
    for name in ("no-such", ".", "cdi/", "fifo", "link", "no/such", "config.toml", "x" * 5000):
        for arguments in ((name,), ("--config-json", name), ("--bundle", name)):
            if arguments != ("--bundle", "."):
                error = told(place, *arguments)["error"]
                # A file that is there may be of another kind.
                is_read = arguments == ("config.toml",)
                assert error["phase"] == ("request" if is_read else "bundle")
    error = told(place, "--bundle", ".")["error"]
    assert "config.json" in error["message"]


def test_standard_input_that_is_no_file(place: Path) -> None:
    """One that is closed, and one that may not be waited for; of a directory Python dies."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    try:
        done = run(place, "--json", given=reading)
    finally:
        os.close(reading)
        os.close(writing)
    assert done.returncode == 1
    assert "cannot read standard input" in json.loads(done.stdout)["error"]["message"]
    program = Path(sys.executable).with_name("gpuruntime")
    closed = subprocess.run(
        ["sh", "-c", '"$0" explain --json <&-', program],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=place,
    )
    assert closed.returncode == 1
    assert (
        'cannot explain "standard input": it is empty'
        in json.loads(closed.stdout)["error"]["message"]
    )


def test_a_terminal_is_not_waited_for(place: Path) -> None:
    """Whoever types the command alone is told what it takes."""
    ours, theirs = pty.openpty()
    try:
        done = run(place, given=theirs)
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 2
    assert f"gpuruntime explain --env {VISIBLE}=all" in done.stderr


def test_one_input_only(place: Path) -> None:
    """Which of two counts would have to be remembered."""
    for arguments in (
        ("-", "--bundle", "."),
        ("-", "-e", "A=b"),
        ("--bundle", ".", "--privileged"),
    ):
        done = run(place, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert "Usage:" in done.stderr


def test_output_that_cannot_be_written(place: Path) -> None:
    """What was said in part is an error."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [Path(sys.executable).with_name("gpuruntime"), "explain", "-e", "A=b"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            cwd=place,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: runtime: cannot write to standard output")


@pytest.mark.parametrize(
    ("gpus", "variables"),
    [
        ("all", [f"{VISIBLE}=all"]),
        ("2", [f"{VISIBLE}=0,1"]),
        ("0", []),
        ("device=GPU-1", [f"{VISIBLE}=GPU-1"]),
        ('"device=0,2"', [f"{VISIBLE}=0,2"]),
        ('all,"capabilities=video,gpu"', [f"{VISIBLE}=all", "NVIDIA_DRIVER_CAPABILITIES=video"]),
        ("capabilities=utility", [f"{VISIBLE}=0", "NVIDIA_DRIVER_CAPABILITIES=utility"]),
        ("count=1,driver=nvidia", [f"{VISIBLE}=0"]),
    ],
)  # fmt: skip
def test_gpus_of_docker(gpus: str, variables: list[str]) -> None:
    """The variables come last, and count more than the image's; the hook is docker's."""
    document = explain_docker.of_options(Options(gpus=gpus, env=(f"{VISIBLE}=x",)), {})
    assert document["process"]["env"] == [f"{VISIBLE}=x", *variables]
    (hook,) = document["hooks"]["prestart"]
    assert hook["path"] == "/usr/bin/nvidia-container-runtime-hook"


@pytest.mark.parametrize(
    "options",
    [
        *(Options(gpus=text) for text in ("", "x", "-2", "99999", "device=0,all", "what=1", '"')),
        *(Options(gpus=text) for text in ("capabilities=all", "all,2", "device=0,device=1", "²")),
        *(Options(env=(text,)) for text in ("", "=", "=x")),
        *(Options(image_env=(text,)) for text in ("", "=x", "WHAT")),
        *(Options(annotation=(text,)) for text in ("", "=x")),
        *(Options(volume=(text,)) for text in ("", "x", "a:b", "/a:b", "/a:/b:c:d")),
        *(Options(mount=(text,)) for text in ("", "type=bind", "type=bind,target=/x", "what=1")),
        *(Options(mount=(text,)) for text in ("type=bind,source=x,target=/x", '"', "a\nb")),
    ],
    ids=repr,
)
def test_options_that_cannot_be_read(options: Options) -> None:
    """As docker refuses them."""
    with pytest.raises(RequestError) as caught:
        explain_docker.of_options(options, {})
    assert caught.value.hint


def test_options_that_cannot_be_read_are_an_error_as_any_other(place: Path) -> None:
    """Whoever asks for JSON gets it."""
    for arguments in (("-e", "=x"), ("--gpus", "x"), ("--mount", "type=bind")):
        assert told(place, *arguments)["error"]["phase"] == "request"


def test_what_docker_makes_of_the_rest() -> None:
    """Rights, mounts, annotations, namespaces; bytes that are no UTF-8 as Go writes them."""
    options = Options(
        env=("A=1", "B=\udcff", "A=2"),
        cap_add=("sys_ptrace", "CAP_KILL"),
        mount=("type=bind,src=/dev/null,dst=/a/../b", '"type=tmpfs","target=/c,d"', "/g:/h"),
        volume=("/dev/null:/e:ro", "/f"),
        annotation=("k=v=w", "l"),
        userns="keep-id",
    )
    document = explain_docker.of_options(options, {})
    assert document["process"]["env"] == ["A=2", "B=\ufffd"]
    bounding = document["process"]["capabilities"]["bounding"]
    assert {"CAP_SYS_PTRACE", "CAP_KILL"} <= set(bounding)
    assert "CAP_SYS_ADMIN" not in bounding
    mounts = [(mount["source"], mount["destination"]) for mount in document["mounts"]]
    assert mounts[:3] == [("/dev/null", "/b"), ("", "/c,d"), ("/g", "/h")]
    assert mounts[3:] == [("/dev/null", "/e"), ("", "/f")]
    assert document["annotations"] == {"k": "v=w", "l": ""}
    assert {"type": "user"} in document["linux"]["namespaces"]
    assert document["linux"]["resources"]["devices"] == [{"allow": False, "access": "rwm"}]
    plain = explain_docker.of_options(Options(userns="host", cap_add=("all",)), {})
    assert {"type": "user"} not in plain["linux"]["namespaces"]
    assert "CAP_SYS_ADMIN" in plain["process"]["capabilities"]["bounding"]
    assert "hooks" not in plain


def test_files_in_one_line_or_in_one_each() -> None:
    """The names fit on a screen; the paths are there for who wants them. No line is forged."""
    report = explain_report.Report(
        reasons=[
            Reason("mount", "/a/x on /b/x", "for video"),
            Reason("mount", "/a/y on /b/y", "for video"),
            Reason("left out", "/a/z", "for ngx"),
        ],
        warnings=["two\nlines"],
    )
    lines = explain_text.as_lines(report, verbose=False).splitlines()
    assert lines[1:] == [
        "mount         x, y: for video",
        "left out      z: for ngx",
        "warning       two\\x0alines",
    ]
    lines = explain_text.as_lines(report, verbose=True).splitlines()
    assert lines[1:4] == [
        "mount         /a/x on /b/x: for video",
        "mount         /a/y on /b/y: for video",
        "left out      /a/z: for ngx",
    ]


ODD = (
    None,
    True,
    7,
    -1,
    1.5,
    "",
    "x",
    [],
    [None],
    [[]],
    [7],
    ["x"],
    {},
    {"x": 7},
    [{}],
    [{"x": 1}],
)
PLACES = (
    *("annotations", "mounts", "hooks", "linux", "root", "process", "process.capabilities"),
    *("process.user", "process.env", "linux.resources", "linux.resources.devices"),
    *("linux.namespaces", "linux.devices", "hooks.prestart", "process.capabilities.bounding"),
    *("mounts.0.source", "mounts.0.destination", "hooks.prestart.0.path", "process.user.uid"),
    *("linux.resources.devices.0.type", "linux.resources.devices.0.access"),
    *("linux.namespaces.0.type", "annotations.cdi", "process.user.additionalGids"),
    *("linux.devices.0.path", "linux.resources.devices.0.major", "linux.netDevices"),
)


@pytest.mark.parametrize("where", PLACES)
def test_odd_values_are_no_bug(where: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a value of another kind is, the answer is an error of ours, or none."""
    monkeypatch.setenv("GPURUNTIME_CONFIG", str(place / "config.toml"))
    for value in ODD:
        document: dict[str, Any] = {
            "process": {"env": [f"{VISIBLE}=0"], "user": {}, "capabilities": {}},
            "mounts": [{"source": "/dev/null", "destination": f"{MOUNT}/0"}],
            "hooks": {"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook"}]},
            "annotations": {},
            "linux": {
                "namespaces": [{"type": "mount"}],
                "resources": {"devices": [{"allow": False}]},
                "devices": [{"path": "/dev/x"}],
            },
        }
        parts = where.split(".")
        item: Any = document
        for part in parts[:-1]:
            item = item[int(part) if part.isdigit() else part]
        item["cdi.k8s.io/x" if parts[-1] == "cdi" else parts[-1]] = value
        data = json.dumps(document).encode()
        report = explain_report.examine(lambda _, d=data: Input(Text("x", d)), None, "")
        if report.error is not None:
            assert type(report.error) is not GpuRuntimeError, (value, report.error.message)
