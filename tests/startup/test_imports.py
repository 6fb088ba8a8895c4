# SPDX-License-Identifier: Apache-2.0
"""What the start path and the hook load: nothing but what is listed here.

Every module costs instructions at each start of a container, and code that runs as root.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]
START_PYTHON = "/usr/bin/python3"
# How old a spec is before it is taken for one that does not change.
SETTLED_NS = 2_000_000_000

# What we may import ourselves.
OURS_MAY_IMPORT = {
    *("sys", "os", "posixpath", "genericpath", "stat", "json", "re", "enum", "functools"),
    *("collections", "operator", "keyword", "reprlib", "copyreg", "types", "itertools"),
    *("__future__", "errno", "struct", "fcntl", "time", "signal", "select"),
}
# What those, and the interpreter's own start, bring with them.
BROUGHT = {
    *("__main__", "builtins", "marshal", "posix", "winreg", "zipimport", "codecs", "io", "abc"),
    *("_abc", "_codecs", "_collections", "_collections_abc", "_frozen_importlib", "_functools"),
    *("_frozen_importlib_external", "_imp", "_io", "_json", "_operator", "_signal", "_sre"),
    *("_stat", "_struct", "_thread", "_warnings", "_weakref", "encodings", "encodings.aliases"),
    *("encodings.utf_8", "encodings.utf_8_sig", "json.decoder", "json.encoder"),
    *("json.scanner", "os.path", "collections.abc"),
    # re is a package since 3.11, three modules before.
    *("re._casefix", "re._compiler", "re._constants", "re._parser"),
    *("sre_compile", "sre_constants", "sre_parse"),
}
# gpuruntime.system alone; the shim changes nothing on the machine but the bundle.
SYSTEM_ONLY = {"_ctypes"}


def of(room: str, modules: str) -> set[str]:
    """Return the names of *room*, a package, and of its *modules*."""
    return {room, *(f"{room}.{name}" for name in modules.split())}


# A create whose grant is saved.
WARM = {
    *of("cdi", "complete edits errors names pathnames strictjson"),
    *of("gpuruntime", "atomic_replace config errors grant log probes record trusted_files"),
    *of("gpuruntime.oci", "argv bundle lowlevel"),
    *of("gpuruntime.plan", "hook_programs injection node_numbers"),
    *of("gpuruntime.request", "capabilities container driver_options parse requirements"),
    *of("gpuruntime.shim", "host main"),
    *of("gpuruntime.snapshots", "config_snapshot grants storage"),
}
# One whose grant is computed; and what only CDI specs need.
SHIM = {
    *WARM,
    *of("gpuruntime", "model"),
    *of("gpuruntime.formats", "driver_version"),
    *of("gpuruntime.plan", "devices driver_files from_inventory gpu_edits sources stale_spec"),
}
SPECS = of("cdi", "document quick registry trusted_open version")
# One that needs a child, and one that needs the inventory.
CHILD = of("gpuruntime", "child_process slowpath")
INVENTORY = CHILD | of("gpuruntime.snapshots", "inventory_json inventory_snapshot")
# Each of these costs more than all of ours.
TOO_MUCH = {"os", "json", "re", "enum", "functools", "collections", "signal", "operator", "struct"}
HOOK = {
    *of("cdi", "pathnames strictjson"),
    *of("gpuruntime", "errors record"),
    *of("gpuruntime.formats", "ldcache ldcache_merge"),
    *of("gpuruntime.oci", "bundle"),
    *of("gpuruntime.snapshots", "hook_log"),
    *of("gpuruntime.system", "clean_names compat drop_in loader mounts operation ops paths"),
    *of("gpuruntime.system", "replace seccomp syscalls text"),
    *of("hooks", "entry options report state supervision update_container"),
}

# An audit hook sees the exec, or the exit, that ends each of the two programs.
REPORT = """
import sys
sys.path.append(TREE)
def report():
    with open(RESULT, "w") as stream:
        stream.write("\\n".join(sorted(sys.modules)))
"""
SHIM_CODE = (
    REPORT
    + """
sys.addaudithook(lambda event, _: report() if event == "os.exec" else None)
from gpuruntime import config
config.DEFAULTS["nvidia-container-runtime.modes.cdi.spec-dirs"] = [SPECS]
config.DEFAULTS["nvidia-container-runtime.runtimes"] = ["/bin/true"]
config.DEFAULTS["nvidia-container-runtime.mode"] = MODE
from gpuruntime.snapshots import storage
storage.RUN_DIRECTORY = RUN
from gpuruntime.shim.main import main
main(CLI_PYTHON)
"""
)
HOOK_CODE = (
    REPORT
    + """
import posix
leave = posix._exit
posix._exit = lambda status: (report(), leave(status))
from hooks.entry import main
main()
"""
)


def start(code: str, arguments: list[str], state: str = "", **names: str) -> set[str]:
    """Run *code* as the launcher does and return the names of the modules at its end."""
    head = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    done = subprocess.run(
        [START_PYTHON, "-I", "-S", "-B", "-X", "utf8", "-c", head + code, *arguments],
        input=state,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return set(Path(names["RESULT"]).read_text().split("\n"))


def spec_text() -> str:
    """Return a spec with every kind of edit that the shim completes or applies."""
    edits = {
        "env": ["NVIDIA_VISIBLE_DEVICES=void"],
        "deviceNodes": [{"path": "/dev/null", "permissions": "rw"}],
        "mounts": [{"hostPath": "/etc", "containerPath": "/x", "options": ["rbind"]}],
        "hooks": [{"hookName": "createContainer", "path": "/x", "args": ["x"], "env": ["A=b"]}],
    }
    devices = [{"name": "0", "containerEdits": edits}]
    return json.dumps({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices})


@pytest.mark.parametrize(("ending", "more"), [("json", set()), ("yaml", CHILD)])
def test_a_create_with_a_gpu_loads_only_what_is_allowed(
    tmp_path: Path, ending: str, more: set[str]
) -> None:
    """The whole create path, also with a spec that goes through the slow path, and again."""
    specs = tmp_path / "cdi"
    for directory in (specs, tmp_path / "run"):
        directory.mkdir()
        directory.chmod(0o755)
    spec = specs / f"gpu.{ending}"
    spec.write_text(spec_text())
    spec.chmod(0o644)
    # Long ago: of a file of just now nothing is kept.
    while time.time_ns() - spec.stat().st_ctime_ns < SETTLED_NS:
        time.sleep(0.05)
    config = tmp_path / "config.json"
    for expected in (SHIM | SPECS | more, WARM):
        config.write_text('{"process": {"env": ["NVIDIA_VISIBLE_DEVICES=0"]}}')
        loaded = start(
            SHIM_CODE,
            ["0", "", "gpu-container-runtime", "create", "--bundle", str(tmp_path), "one"],
            TREE=str(TREE),
            SPECS=str(specs),
            MODE="cdi",
            RUN=str(tmp_path / "run"),
            CLI_PYTHON=sys.executable,
            RESULT=str(tmp_path / "modules"),
        )
        assert json.loads(config.read_text())["linux"]["devices"][0]["path"] == "/dev/null"
        assert loaded - OURS_MAY_IMPORT - BROUGHT == expected
    assert loaded & TOO_MUCH == set()


def test_the_inventory_loads_only_what_is_allowed(tmp_path: Path) -> None:
    """What a create imports whose GPUs are read from the inventory: neither `re` nor `json`."""
    code = "from gpuruntime.shim import host, main\nfrom gpuruntime.plan import sources\n"
    code += "from gpuruntime.snapshots import inventory_snapshot\nreport()\n"
    loaded = start(REPORT + code, [], TREE=str(TREE), RESULT=str(tmp_path / "modules"))
    assert loaded - OURS_MAY_IMPORT - BROUGHT == SHIM | INVENTORY
    assert loaded & TOO_MUCH == {"os"}


def test_the_hook_loads_only_what_is_allowed(tmp_path: Path) -> None:
    """The hook runs as root in front of an image's files: the less code the better."""
    library = tmp_path / "rootfs" / "usr" / "lib" / "libtiny.so.1"
    library.parent.mkdir(parents=True)
    library.touch()
    (tmp_path / "config.json").write_text('{"root": {"path": "rootfs"}}')
    loaded = start(
        HOOK_CODE,
        [
            *("gpu-cdi-hook", "update-container", "--link", "libtiny.so.1::/usr/lib/libtiny.so"),
            *("--library", "libtiny.so.1::/usr/lib/libtiny.so.1::x86-64", "--mask-params"),
            *("--cuda-compat", "550.54", "--application-profile"),
        ],
        json.dumps({"ociVersion": "1.0.2", "bundle": str(tmp_path)}),
        TREE=str(TREE),
        RESULT=str(tmp_path / "modules"),
    )
    assert (library.parent / "libtiny.so").is_symlink()
    assert (tmp_path / "rootfs" / "etc" / "ld.so.cache").is_file()
    assert loaded - OURS_MAY_IMPORT - BROUGHT - SYSTEM_ONLY == HOOK


@pytest.mark.parametrize(
    "text", ["", "[", '{"a"', '{"a":1,}', '"x', "1 2", "nul", '"\\x"', "\ufeff1"]
)
def test_what_is_no_json_is_refused_also_before_json_is_loaded(text: str) -> None:
    """The C scanner takes its errors from that package, which only then may cost something."""
    code = f"""
import sys
sys.path.append({str(TREE)!r})
from cdi import strictjson
assert strictjson.loads('[{{"a": 1.5}}]') == [{{"a": 1.5}}]
assert "json" not in sys.modules
try:
    strictjson.loads({text!r})
except ValueError as error:
    print(error)
"""
    done = subprocess.run(
        [START_PYTHON, "-I", "-S", "-B", "-X", "utf8", "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    with pytest.raises(ValueError, match=r".") as caught:
        json.loads(text)
    assert done.stdout == f"{caught.value}\n"


def test_a_module_nobody_listed_is_seen(tmp_path: Path) -> None:
    """The control: the report tells of an import in the middle of the work."""
    loaded = start(
        REPORT + "import dataclasses\nreport()\n",
        [],
        TREE=str(TREE),
        RESULT=str(tmp_path / "modules"),
    )
    assert "dataclasses" in loaded - OURS_MAY_IMPORT - BROUGHT


@pytest.mark.parametrize("name", sorted(SHIM | SPECS | INVENTORY | HOOK))
def test_every_module_of_the_start_path_exists(name: str) -> None:
    """A list that names what is gone would allow its return."""
    path = TREE / name.replace(".", "/")
    assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
