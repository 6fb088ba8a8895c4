# SPDX-License-Identifier: Apache-2.0
"""The transcripts of the documents: what each command prints, made again on a simulated host.

A transcript is a block ```` ```console ````: commands behind "$ " or "# ", each with what it
prints. SETTINGS says on which host the transcripts of a page are made, and ELSEWHERE which test
makes the others. tests/unit/test_transcripts.py fails for a transcript that neither has.

As a program, `transcripts.py NAME` runs the commands of a setting on the simulated host that it
runs on, and prints a list of outputs as JSON; those of installed programs where INSTALLED is set.
Standard library only: clean roots have no other.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
SIMHOST = TREE / "tests" / "simhost" / "simhost.py"
PROGRAMS = TREE / ".venv" / "bin"
PROMPTS = ("$ ", "# ")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEADLINE_S = 120
# What differs from one machine, build or run to the next: pattern, replacement.
NORMALISATIONS = (
    # Programs of ours and runc's, in a checkout, in /usr/local, and where distributions have them.
    (rf"{re.escape(str(PROGRAMS))}/", "/usr/bin/"),
    (r"/usr/(local/)?s?bin/", "/usr/bin/"),
    # How much slower a create is, in `make demo`.
    (r"GPU \d+\.\d+, with GPUs \d+\.\d+", "GPU N, with GPUs N"),
    # How long the driver took to answer.
    (r"in \d+\.\d s\b", "in N s"),
    # The words that docker puts in front of and behind a runtime's error, by its version.
    (r"docker: Error response from daemon: .*OCI runtime create failed: ", "docker: "),
    (r": unknown\.?(\n\nRun 'docker run --help' for more information)?$", ": unknown"),
    # Versions of the machine's kernel and engines.
    (r"Linux [\w.+~-]+", "Linux N"),
    (r"\b(podman|docker|containerd|runc|crun) \d[\w.+~-]*", r"\1 N"),
)


@dataclass(frozen=True)
class Transcript:
    """One block of *page*: its first line, and each command with its output."""

    page: str
    line: int
    steps: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """Where it is, for messages."""
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Setting:
    """A simulated host with *options*, on which a shell has run *prepare*.

    *transcripts* are pages, or a page and a command ("README.md: gpuruntime doctor") with which
    the transcript begins. *needs* are programs that the machine must have.
    """

    transcripts: tuple[str, ...]
    options: tuple[str, ...] = ()
    prepare: str = ""
    needs: tuple[str, ...] = ()

    def has(self, transcript: Transcript) -> bool:
        """Return whether *transcript* is made here."""
        for entry in self.transcripts:
            page, _, command = entry.partition(": ")
            if page == transcript.page and transcript.steps[0][0].startswith(command):
                return True
        return False


# A docker that `systemctl restart docker` starts, and its images: debian:12 and box, which has
# what the simulated NVML reads.
DOCKER = rf"""
mkdir -p /run/docker-of-page/image
cat >/usr/bin/systemctl <<'END'
#!/bin/sh
cd /run/docker-of-page
if [ -e pid ]; then kill "$(cat pid)"; while [ -e pid ]; do sleep 0.1; done; fi
dockerd --data-root "$PWD/data" --exec-root "$PWD/exec" --pidfile "$PWD/pid" \
  --iptables=false --ip6tables=false --bridge=none --storage-driver=overlay2 >log 2>&1 </dev/null &
for _ in $(seq 300); do docker version >/dev/null 2>&1 && exit; sleep 0.1; done
cat log >&2; exit 1
END
chmod 755 /usr/bin/systemctl
PYTHONPATH='{TREE}/tests/containers' '{sys.executable}' -B - <<'END'
import pathlib, shutil, image
image.PATH = "PATH=/usr/bin:/bin"
work = pathlib.Path("/run/docker-of-page/image")
root = image.make_root(work / "root")
(conf,) = pathlib.Path("/usr/lib").glob("*/fakenvml.conf")
target = root / conf.relative_to("/")
target.parent.mkdir(parents=True, exist_ok=True)
shutil.copy(conf, target)
for name in ("debian:12", "box:latest"):
    image.make_archive(root, work / f"{{name.partition(':')[0]}}.tar", name)
END
systemctl restart docker
for name in debian box; do docker load --quiet --input "/run/docker-of-page/image/$name.tar"; done
"""
CONFIGURED_DOCKER = f"""{DOCKER}
gpuruntime runtime configure --runtime docker; systemctl restart docker
"""
DOCKER_PROGRAMS = ("docker", "dockerd", "gcc")
# The config file that the package gpuruntime-nvidia-compat makes, which the guide installs.
COMPAT = """
mkdir -p /etc/nvidia-container-runtime
cat >/etc/nvidia-container-runtime/config.toml <<'END'
[nvidia-container-runtime.modes.jit-cdi]
driver-capabilities = "all"
END
"""
BOOTED = "gpuruntime system create-dev-char-symlinks; gpuruntime cdi refresh\n"

SETTINGS = {
    "engines": Setting(
        (
            "README.md: gpuruntime runtime configure",
            "docs/reference/runtime-configure.md",
            "docs/install.md: systemctl daemon-reload",
            "docs/install.md: gpuruntime runtime configure",
        ),
    ),
    "a node is missing": Setting(("README.md: gpuruntime doctor",), prepare="rm /dev/nvidia-uvm"),
    "eight GPUs with docker": Setting(
        ("README.md: docker run",), prepare=CONFIGURED_DOCKER, needs=DOCKER_PROGRAMS
    ),
    "first container": Setting(
        ("docs/guides/first-container.md",), ("--gpus", "1"), f"{DOCKER}{BOOTED}", DOCKER_PROGRAMS
    ),
    "node": Setting(
        ("docs/guides/node.md: gpuruntime",),
        ("--gpus", "2"),
        f"{COMPAT}{BOOTED}gpuruntime runtime configure --runtime docker",
    ),
    "cdi generate": Setting(("docs/reference/cdi.md: gpuruntime cdi generate",), ("--gpus", "2")),
    "cdi refresh": Setting(
        ("docs/reference/cdi.md: gpuruntime cdi refresh",),
        ("--gpus", "2"),
        "mv /usr/lib/*/libnvidia-encode.so.[0-9]*.* /run; gpuruntime cdi refresh; "
        "mv /run/libnvidia-encode.so.* /usr/lib/$(uname -m)-linux-gnu",
    ),
    "cdi files": Setting(
        (
            "docs/reference/cdi.md: gpuruntime cdi list",
            "docs/reference/cdi.md: gpuruntime cdi validate",
            "docs/reference/cdi.md: gpuruntime cdi diff",
        ),
        prepare=f"cp -R '{TREE}/tests/data/pages/cdi/.' .",
    ),
    "explain": Setting(
        ("docs/reference/explain.md",),
        ("--gpus", "2"),
        f"""
mkdir -p /etc/gpuruntime; touch /etc/gpuruntime/config.toml
PYTHONPATH='{TREE}/tests' '{sys.executable}' -B -c '
import image_trees, pathlib
image_trees.of_the_page(pathlib.Path("."))'
""",
        ("gcc",),
    ),
}
# Beginning of a command on a page → the test that runs it, or such a command. Whoever adds one
# that prints something says in PRINTED_ELSEWHERE which test compares that with the page.
ELSEWHERE = {
    ("README.md", "make demo"): "tests/system/test_demo.py",
    ("README.md", "make test"): ".ci/run",
    ("README.md", "make deb"): "tests/system/test_deb.py",
    ("README.md", "apt install"): "tests/packages/clean_roots.py",
    ("CONTRIBUTING.md", "make"): "tests/unit/test_make.py",
    ("docs/install.md", "make install"): "tests/system/test_install.py",
    ("docs/install.md", "make uninstall"): "tests/system/test_install.py",
    ("docs/install.md", "systemctl"): "tests/system/test_boot.py",
    ("docs/install.md", "make deb"): "tests/system/test_deb.py",
    ("docs/install.md", "apt install"): "tests/packages/clean_roots.py",
    ("docs/install.md", "make bundle"): "tests/system/test_bundle.py",
    ("docs/install.md", "tar"): "tests/system/test_bundle.py",
    ("docs/install.md", "/opt/gpuruntime-"): "tests/system/test_bundle.py",
    ("docs/install.md", "make wheel"): "tests/system/test_wheel.py",
    ("docs/install.md", "python3 -m venv"): "tests/system/test_wheel.py",
    ("docs/install.md", "/opt/gpuruntime/"): "tests/system/test_wheel.py",
    ("docs/install.md", "make release"): "tests/system/test_release.py",
    ("docs/install.md", "cd build/release"): "tests/system/test_release.py",
    ("docs/guides/node.md", "apt"): "tests/packages/clean_roots.py",
    ("docs/reference/doctor.md", "gpuruntime doctor"): "tests/system/test_doctor_engines.py",
    ("docs/guides/troubleshooting.md", "gpuruntime doctor"): "tests/system/test_doctor_engines.py",
    ("docs/switch.md", ""): "tests/switch/test_switch.py",
    ("docs/development/recordings.md", "tests/record"): "tests/record/record.py",
}
PRINTED_ELSEWHERE = {
    ("README.md", "make demo"): "tests/system/test_demo.py",
    ("docs/reference/doctor.md", "gpuruntime doctor"): "tests/system/test_doctor_engines.py",
    ("docs/guides/troubleshooting.md", "gpuruntime doctor"): "tests/system/test_doctor_engines.py",
    ("docs/switch.md", ""): "tests/switch/test_switch.py",
}
# A file that the page shows, by the name in its first line: it is where the page's commands run.
FILES = re.compile(r"^```yaml\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A command with a word for the reader to replace; it shows no output.
PLACEHOLDER = re.compile(r"\b(IMAGE|COMMAND|REF|DIR|NAME)\b")


def pages() -> list[Path]:
    """Return the documents that may have transcripts."""
    return sorted([*TREE.glob("*.md"), *(TREE / "docs").rglob("*.md")])


def of_page(path: Path) -> list[Transcript]:
    """Return the transcripts of the document *path*, in their order."""
    transcripts = []
    block: list[str] | None = None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if block is None and line.strip() == "```console":
            block, start, indent = [], number, len(line) - len(line.lstrip())
        elif block is not None and line.strip() == "```":
            steps = tuple(_steps(block))
            transcripts.append(Transcript(str(path.relative_to(TREE)), start, steps))
            block = None
        elif block is not None:
            block.append(line[indent:])
    return transcripts


def _steps(lines: list[str]) -> list[tuple[str, str]]:
    steps: list[tuple[str, str]] = []
    for line in lines:
        if line.startswith(PROMPTS):
            steps.append((line[2:], ""))
        else:
            command, output = steps[-1]
            steps[-1] = (command, f"{output}{line}\n")
    return steps


def of_setting(setting: Setting) -> list[Transcript]:
    """Return the transcripts that are made in *setting*."""
    return [one for path in pages() for one in of_page(path) if setting.has(one)]


def normalised(text: str) -> str:
    """Return *text* without what differs between machines, builds and runs."""
    for pattern, replacement in NORMALISATIONS:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text


def play(setting: Setting) -> list[list[str | None]]:
    """Return the outputs of the setting's transcripts, None for a command that is not run."""
    work = Path("/run/transcripts")
    work.mkdir()
    os.chdir(work)
    # In a clean root the programs are those that its packages have installed.
    if "INSTALLED" not in os.environ:
        os.environ["PATH"] = f"{PROGRAMS}:{os.environ['PATH']}"
    _shell(setting.prepare, check=True)
    for transcript in of_setting(setting):
        for name, text in FILES.findall((TREE / transcript.page).read_text()):
            (work / name).write_text(text)
    return [
        [None if _is_elsewhere(one, command) else _shell(command) for command, _ in one.steps]
        for one in of_setting(setting)
    ]


def _is_elsewhere(transcript: Transcript, command: str) -> bool:
    return bool(PLACEHOLDER.search(command)) or maker(transcript.page, command) is not None


def maker(page: str, command: str) -> str | None:
    """Return the test elsewhere that runs *command* of *page*, or None."""
    for (other, beginning), test in ELSEWHERE.items():
        if page == other and command.startswith(beginning):
            return test
    return None


def _shell(command: str, *, check: bool = False) -> str:
    done = subprocess.run(
        ["bash", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    if check and done.returncode != 0:
        sys.exit(f"{command}\nstatus {done.returncode}: {done.stdout}")
    return done.stdout


def differences(setting: Setting, outputs: list[list[str | None]]) -> list[str]:
    """Return what the documents show and *outputs*, of the program, do not, or vice versa.

    A block without any output is a list of commands: that they run is all that it says.
    """
    different = []
    for transcript, printed in zip(of_setting(setting), outputs, strict=True):
        if not any(shown for _, shown in transcript.steps):
            continue
        for (command, shown), output in zip(transcript.steps, printed, strict=True):
            if output is not None and normalised(output) != normalised(shown):
                different.append(
                    f"{transcript.name}: $ {command}\nshown:\n{shown}printed:\n{output}"
                )
    return different


def write(setting: Setting, outputs: list[list[str | None]]) -> None:
    """Put *outputs* into the documents, where they differ from what these show."""
    made = dict(zip(of_setting(setting), outputs, strict=True))
    for path in pages():
        lines = path.read_text().splitlines(keepends=True)
        for transcript in reversed(of_page(path)):
            if transcript not in made:
                continue
            end = next(n for n in range(transcript.line, len(lines)) if lines[n].strip() == "```")
            block = lines[transcript.line : end]
            indent = lines[end][: -len(lines[end].lstrip())]
            commands = [line for line in block if line[len(indent) :].startswith(PROMPTS)]
            fresh = []
            for command, (_, shown), output in zip(
                commands, transcript.steps, made[transcript], strict=True
            ):
                is_same = output is None or normalised(output) == normalised(shown)
                text = shown if output is None or is_same else _in_page(output)
                fresh += [
                    command,
                    *(f"{indent if line else ''}{line}\n" for line in text.splitlines()),
                ]
            lines[transcript.line : end] = fresh
        path.write_text("".join(lines))


def _in_page(output: str) -> str:
    """Return *output* as an installation prints it."""
    return output.replace(f"{PROGRAMS}/", "/usr/bin/")


def on_host(name: str) -> list[list[str | None]]:
    """Return what `play` prints on the simulated host of the setting *name*; raise if it fails."""
    setting = SETTINGS[name]
    command = [sys.executable, "-B", str(SIMHOST), "run", *setting.options, "--"]
    done = subprocess.run(
        [*command, sys.executable, "-B", __file__, name],
        env={"PATH": PATH, "LC_ALL": "C.UTF-8"},
        capture_output=True, text=True, check=False, timeout=300, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{name}: status {done.returncode}\n{done.stderr}")
    outputs: list[list[str | None]] = json.loads(done.stdout)
    return outputs


if __name__ == "__main__":
    json.dump(play(SETTINGS[sys.argv[1]]), sys.stdout)
