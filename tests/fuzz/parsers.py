# SPDX-License-Identifier: Apache-2.0
"""Fuzz targets for the parsers of files that an image, an engine or a driver wrote.

Each takes bytes, mutated from the small files of `corpus/NAME`, and raises if a promise is broken:
an error that is not ours, a result out of bounds, a result that differs from that of its twin.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cdi import annotations, names, quick, registry
from cdi import document as documents
from cdi.errors import CdiError
from gpuruntime import __version__, log, probes
from gpuruntime.cli import explain_input
from gpuruntime.config import Config
from gpuruntime.configfile import compilation
from gpuruntime.discover import device_nodes
from gpuruntime.errors import BundleError, ConfigError, GpuRuntimeError, LdcacheError, RequestError
from gpuruntime.formats import elf, ldcache_merge
from gpuruntime.grant import Grant
from gpuruntime.oci import argv, bundle
from gpuruntime.request import parse
from gpuruntime.snapshots import grants, inventory_json
from gpuruntime.system import clean_names, drop_in, loader, ops
from gpuruntime.system.paths import Root
from hooks import classic, state, update_container

CORPUS = Path(__file__).parent / "corpus"
WORDS: dict[str, tuple[str, ...]] = {
    "json": (
        *('"', "{", "}", "[", "]", ":", ",", "null", "true", "1", "-1", "1e999", "NaN", "\\u0000"),
        *("\\ud800", "[" * 70, '"hooks":{}', '"HOOKS":1', '"process":', '"env":', '"root":'),
        *('"path":"/"', '"path":"../.."', '"mounts":[]', '"uid":', "4294967296", "\ufeff", "\xff"),
    ),
    "words": (
        *("\0", "--", "-", "=", "::", "/", "..", ",", "--bundle", "-b", "create", "run"),
        "--root=x",
        *(
            "--link",
            "--library",
            "--folder",
            "--mode",
            "--path",
            "--mask-params",
            "x86-64",
            "0644",
        ),
        *(
            "--quiet",
            "-d",
            "--config",
            "-f",
            "--log",
            "--debug=false",
            "--version",
            "\n",
            " ",
            "%",
        ),
    ),
    "text": (
        "\n",
        "=",
        '"',
        "'",
        "[",
        "]",
        "#",
        ".",
        "true",
        "1",
        "\t",
        "\\",
        "\0",
        "\u2028",
        "/",
    ),
    "binary": ("\0", "\0\0\0\0", "\xff\xff\xff\xff", "\x7fELF", "ld.so-1.7.0", "\x01\0\0\0"),
}
MAX_BYTES = 64 << 10
RESULT_BYTES = 16 << 20


def seeds(name: str) -> list[bytes]:
    """Return the files of the corpus of the target *name*."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def mutated(rng: random.Random, files: list[bytes], words: tuple[str, ...]) -> bytes:
    """Return one of *files* with random changes to its bytes; sometimes unchanged."""
    data = bytearray(rng.choice(files))
    for _ in range(rng.choice((0, 1, 1, 2, 3, 6))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 1, 2, 4, 8, 24, 100)))
        how = rng.randrange(8)
        if how == 0:
            del data[at:end]
        elif how == 1:
            data[at:at] = rng.choice(words).encode("latin-1", "replace")
        elif how == 2:
            data[at:end] = data[at:end] * rng.randint(2, 30)
        elif how == 3:
            other = rng.choice(files)
            start = rng.randrange(len(other) + 1)
            data[at:end] = other[start : start + rng.randint(1, 60)]
        elif how == 4 and data:
            data[at - 1] ^= 1 << rng.randrange(8)
        elif how == 5 and len(data) >= 4:
            place = rng.randrange(len(data) - 3) & ~3
            number = rng.choice(
                (0, 1, 0xFF, 0x7FFFFFFF, 0xFFFFFFFF, len(data), rng.randrange(256))
            )
            struct.pack_into("<I", data, place, number)
        elif how == 6:
            del data[at:]
        else:
            data[at:end] = rng.choice(words).encode("latin-1", "replace") * rng.randint(1, 40)
    return bytes(data[:MAX_BYTES])


def must(fact: object, what: str) -> None:
    """Raise AssertionError with the message *what* if *fact* is false."""
    if not fact:
        raise AssertionError(what)


def config_json(data: bytes, rng: random.Random, place: Path) -> None:
    """Read the config.json of a bundle: an editable document is stored and read back unchanged."""
    del rng
    path = place / "config.json"
    path.write_bytes(data)
    try:
        opened = bundle.Bundle(str(place))
        document, doubt = opened.parse()
        if doubt is not None:
            must("\n" not in str(opened.ambiguous(doubt).lines().partition("\nhint")[0]), "lines")
            return
        opened.store(document)
    except BundleError:
        return
    must(bundle.parse(path.read_bytes()) == (document, None), "not what was stored")
    must(not [n for n in os.listdir(place) if n.startswith(".config")], "a temporary file")


def oci_state(data: bytes, rng: random.Random, place: Path) -> None:
    """Read an OCI state and the bundle that it names: the root is never the root of the host."""
    root_path = rng.choice(
        ("rootfs", "rootfs", "rootfs/", "", "..", "/", "none", "a\ud800", "\0", 1)
    )
    name = rng.choice(("state", "state", "state", "none", ".", "../x"))
    (place / "state").write_bytes(data.replace(b"@PLACE@", os.fsencode(place)))
    (place / "rootfs").mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps({"root": {"path": root_path}}))
    try:
        fd = state.open_state(f"{place}/{name}")
        try:
            bundle_path = state.read_bundle(fd)
        finally:
            os.close(fd)
        must(bundle_path.startswith("/") and ".." not in bundle_path.split("/"), bundle_path)
        root = state.open_root(bundle_path)
    except BundleError:
        return
    must(not root.is_host_root(), "the host's root")
    root.close()


def container_request(data: bytes, rng: random.Random, place: Path) -> None:
    """Parse the request of a container: no request without a trigger, bounded messages."""
    del place
    try:
        document, doubt = bundle.parse(data)
    except ValueError:
        return
    if doubt is not None:
        return
    for values in (
        {},
        {"nvidia-container-runtime.mode": rng.choice(("cdi", "legacy", "jit-cdi"))},
        {
            "accept-nvidia-visible-devices-as-volume-mounts": True,
            "accept-nvidia-visible-devices-envvar-when-unprivileged": rng.random() < 0.5,
            "swarm-resource": "DOCKER_RESOURCE_GPU",
            "supported-driver-capabilities": rng.choice(("all", "compute")),
        },
    ):
        operator = Config(values, None)
        try:
            request = parse.from_oci(document, operator)
        except GpuRuntimeError as error:
            must(len(error.lines()) < 10_000, "a long message")
            continue
        must(not request or parse.may_ask(data, operator), "a request without a trigger")
        must(len(request.devices) <= parse.MAX_REQUESTS, "very many")
        for ignored in request.ignored:
            must(len(str(ignored)) < 2000, "a long warning")


def command_line(data: bytes, rng: random.Random, place: Path) -> None:
    """Parse the command line of the runtime: the only error is a bundle without a value."""
    del rng, place
    words = data.decode("utf-8", "surrogateescape").split("\0")
    command = argv.parse(words)
    must(not command.creates or set(argv.CREATING) & set(words), "creates from nothing")
    try:
        must(
            command.bundle is None or command.bundle in data.decode("utf-8", "surrogateescape"), ""
        )
    except RequestError:
        must(command.creates, "an error where nothing is created")


def hook_arguments(data: bytes, rng: random.Random, place: Path) -> None:
    """Parse the arguments of a hook: every resulting path is clean."""
    del place
    words = data.decode("utf-8", "surrogateescape").split("\0")
    name, rest = words[0], words[1:]
    if rng.random() < 0.2:
        name = rng.choice((update_container.NAME, *classic.OPTIONS))
    try:
        if name in classic.OPTIONS:
            planned = classic.plan(name, classic.read(name, rest))
        else:
            planned = update_container.plan(update_container.read(rest))
    except RequestError as error:
        must(len(error.lines()) < 5000, "a long message")
        return
    for operation in planned:
        must("\n" not in operation.describe(), "more than a line")
        path = getattr(operation, "path", None)
        if path is not None:
            must(clean_names.is_clean(path, clean_names.LINK_PATH), path)


def loader_cache(data: bytes, rng: random.Random, place: Path) -> None:
    """Merge into the loader cache of an image: our entries are in it; merging is idempotent."""
    del place
    entries = [
        ldcache_merge.CacheEntry(f"libcuda.so.{n}", f"/usr/lib/libcuda.so.{n}", 0x303)
        for n in range(rng.randint(0, 3))
    ]
    first = rng.choice(((), ("/usr/lib", "/opt/lib/")))
    try:
        merged = ldcache_merge.merge(data, entries, keep_first=first)
        must(len(merged) < RESULT_BYTES, "a cache that grows")
        rows = ldcache_merge.parse(merged)
        must(ldcache_merge.merge(merged, entries, keep_first=first) == merged, "twice is not once")
        ldcache_merge.listed_directories(data, ["/usr/lib"])
    except LdcacheError:
        return
    must({(e.soname, e.path) for e in entries} <= {row[:2] for row in rows}, "ours are lost")


def elf_file(data: bytes, rng: random.Random, place: Path) -> None:
    """Read a library from bytes and from a file, with the same result."""
    del rng
    path = place / "library"
    path.write_bytes(data)
    results: list[object] = []
    with path.open("rb") as stream:
        for source in (data, stream):
            try:
                library = elf.read(source)
                must(len(library.needed) <= elf.MAX_NEEDED, "too many names")
                results.append(library)
            except (elf.ElfError, OSError):
                # Both errors are allowed for an offset beyond the end of the file.
                results.append(None)
    must(results[0] == results[1], f"{results}")


def snapshot(data: bytes, rng: random.Random, place: Path) -> None:
    """Read a snapshot: a valid inventory is encoded as it was; its state is compared."""
    del rng, place
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(content, dict):
        return
    must(isinstance(probes.changed(content.get("state")), list), "not a list")
    try:
        inventory = inventory_json.decode(content.get("inventory"))
    except ValueError:
        return
    must(inventory_json.encode(inventory) == content["inventory"], "not as it was")


def saved_grants(data: bytes, rng: random.Random, place: Path) -> None:
    """Read the saved grants: a grant or None; a grant saved afterwards is found."""
    place.chmod(0o755)
    path = place / grants.NAME
    path.write_bytes(data.replace(b"VERSION", __version__.encode()))
    path.chmod(0o644)
    key = rng.choice((b"[1]", b"[2]", b"", b"\t", b'["jit-cdi",["all"]]'))
    stamp = rng.choice((None, ["/x", 1, 2, 3, 4]))

    def opened() -> grants.SavedGrants:
        saved = grants.SavedGrants(str(place))
        values = saved.values(["/x", 1, 2, 3, 4])
        must(values is None or isinstance(values, dict), f"{values!r}")
        saved.use(stamp, {})
        return saved

    loaded = opened().find(key)
    must(loaded is None or isinstance(loaded, Grant), "no grant")
    again = opened().again()
    must(again.stamp == stamp, "another config")
    must(again.find(key) == loaded, "another grant")
    saved_state = again.state(key)
    must(loaded is None or saved_state is not None, "a grant without a state")
    state = probes.read({probes.PROGRAM: [probes.PROGRAM, [probes.VERSION]]})
    grant = Grant({"env": ["A=b"]}, notes=["a note"])
    opened().keep(b"x" * (grants.MAX_KEY_BYTES + 1), grant, state, of_inventory=True)
    for number in range(rng.choice((0, 0, 0, grants.MAX_ENTRIES))):
        opened().keep(b"%d" % number, grant, state, of_inventory=True)
    opened().keep(key, grant, state, of_inventory=rng.random() < 0.5)
    must(opened().find(key) == grant, "not kept")
    path.unlink()


def cdi_annotations(data: bytes, rng: random.Random, place: Path) -> None:
    """Parse annotations: names of devices, or an error with a category."""
    del place
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return
    try:
        must(annotations.request_key(str(rng.choice(("a.com/b", "", "-", "p" * 64))), "id"), "")
    except CdiError as error:
        must(error.category, "no category")
    try:
        _, devices = annotations.parse(content)
        must(all(map(names.is_qualified, devices)), f"{devices}")
        if devices:
            updated = annotations.update(content, "plugin", "id", devices[:2])
            must(set(content) <= set(updated), "annotations are lost")
    except CdiError as error:
        must(error.category, "no category")
    try:
        annotations.check(content)
    except CdiError as error:
        must(error.category, "no category")


def config_toml(data: bytes, rng: random.Random, place: Path) -> None:
    """Compile a config file: values, or an error that names the file."""
    del rng
    path = place / "config.toml"
    path.write_bytes(data)
    text = data.decode("utf-8", "replace")
    try:
        values, warnings = compilation.accepted(str(path), text)
    except ConfigError as error:
        must(str(path) in error.message, error.message)
        return
    must(len(warnings) <= compilation.MAX_WARNINGS + 1, "many warnings")
    operator = Config(values, str(path))
    must(isinstance(operator.runtimes, (list, tuple)), "no runtimes")


def mig_minors(data: bytes, rng: random.Random, place: Path) -> None:
    """Read the list of capabilities of the kernel: a minor number or None."""
    del rng
    proc = place / "proc"
    for name in ("driver/nvidia-caps", "driver/nvidia/capabilities/gpu0/mig/gi1"):
        (proc / name).mkdir(parents=True, exist_ok=True)
    (proc / "driver/nvidia-caps/mig-minors").write_bytes(data)
    (proc / "driver/nvidia/capabilities/gpu0/mig/gi1/access").write_bytes(data)
    capabilities = device_nodes._Capabilities(str(proc))
    for name in ("gpu0/gi1/access", "gpu0/gi1/ci0/access", "config", "../x"):
        minor = capabilities.minor(name)
        must(minor is None or (type(minor) is int and minor >= 0), f"{minor}")


def params(data: bytes, rng: random.Random, place: Path) -> None:
    """Mask the params of the driver: one line differs, or no line needs masking."""
    del rng
    path = place / "params"
    path.write_bytes(data)
    before = ops.PARAMS
    ops.PARAMS = str(path)
    try:
        masked = ops._masked_params()
    finally:
        ops.PARAMS = before
    if masked is None:
        must(b"ModifyDeviceFiles: 1" not in data[: 64 << 10].splitlines(), "not masked")
        return
    must(b"ModifyDeviceFiles: 1" not in masked.splitlines(), "still allowed")
    must(len(masked) <= len(data) + 1 + data.count(b"\r"), "longer")


MUSL_LIST = "ld-musl-x86_64.path"


def loader_files(data: bytes, rng: random.Random, place: Path) -> None:
    """Read and write the loader lists of an image: all directories are clean, ours are listed."""
    top = place / f"root-{rng.randrange(1 << 40):x}"
    (top / "etc/ld.so.conf.d").mkdir(parents=True)
    try:
        if rng.random() < 0.5:
            (top / "sbin").mkdir()
            (top / "sbin/ldconfig").touch()
        for name in ("ld.so.conf", MUSL_LIST):
            if rng.random() < 0.7:
                (top / "etc" / name).write_bytes(data)
        for name in ("00-a.conf", drop_in.DRIVER, drop_in.COMPAT, "zz.conf"):
            if rng.random() < 0.5:
                (top / "etc/ld.so.conf.d" / name).write_bytes(data)
        root = Root(str(top))
        messages: list[str] = []
        must(all(map(clean_names.is_clean, drop_in.listed_before(root))), "an unclean directory")
        must(all(map(clean_names.is_clean, drop_in.read(root, drop_in.DRIVER))), "unclean")
        drop_in.write(root, drop_in.DRIVER, ["/usr/lib/gpu"], messages.append)
        must(drop_in.read(root, drop_in.DRIVER) == ["/usr/lib/gpu"], "not what was written")
        _add_to_musl_list(root, top / "etc" / MUSL_LIST)
        drop_in.remove(root, drop_in.DRIVER)
        must(len(messages) <= 1, f"{messages}")
        drop_in.has_ldconfig(root)
        root.close()
    finally:
        for folder, directories, files in os.walk(top, topdown=False):
            for name in files:
                os.unlink(f"{folder}/{name}")
            for name in directories:
                os.rmdir(f"{folder}/{name}")
        os.rmdir(top)


def _add_to_musl_list(root: Root, path: Path) -> None:
    """Add to the list *path*: it contains directories afterwards, or is unchanged."""
    before = path.read_bytes() if path.exists() else None
    try:
        loader._add_to_list(root, MUSL_LIST, ["/usr/lib/gpu"])
    except OSError as error:
        must(error.errno == errno.EINVAL and path.read_bytes() == before, f"{error}")
        return
    lines = path.read_bytes().replace(b":", b"\n").split(b"\n")
    must(all(line.startswith(b"/") for line in lines if line), "no directory")
    must(b"/usr/lib/gpu" in lines or path.read_bytes() == before, "not added")


def quick_check(data: bytes, rng: random.Random, place: Path) -> None:
    """Compare the quick recogniser with the full check: both list the same devices."""
    del rng, place
    try:
        text = data.decode()
        spec = registry.decode_json(text)
    except (ValueError, RecursionError, CdiError):
        return
    devices = quick.devices(text, spec)
    if devices is None:
        return
    checked = documents.check(spec)
    must(list(devices) == [device["name"] for device in checked["devices"]], f"{list(devices)}")


def log_text(data: bytes, rng: random.Random, place: Path) -> None:
    """Log text of an image: the record is one printable, bounded line, and valid JSON."""
    text = data.decode("utf-8", "surrogateescape")
    path = place / "log"
    path.unlink(missing_ok=True)
    is_json = rng.random() < 0.5
    log.Log(str(path), json_format=is_json).warning(text)
    content = path.read_bytes()
    must(content.count(b"\n") == 1 and content.endswith(b"\n"), "more than a line")
    must(not re.search(rb"[^\x20-\x7e\n]", content), "not printable")
    must(len(content) < 5 * 4096 + 200, f"{len(content)} bytes")
    if is_json:
        json.loads(content)


def explained_file(data: bytes, rng: random.Random, place: Path) -> None:
    """Read a file of an engine or of Kubernetes: a candidate is an OCI config, or an error."""
    del place
    name = rng.choice((None, None, "train", "list", "map", "reserved", "cdi", "serve/main", "c"))
    image_env = rng.choice(((), (), ("A=b",)))
    try:
        candidate = explain_input.candidate("file", data, name, image_env, {"HOME": "/h"})
        one = None if candidate is None else candidate.describe()
    except RequestError as error:
        must(error.hint, "no hint")
        must("\n" not in error.lines().partition("\nhint")[0], "lines")
        return
    if one is not None:
        json.dumps(one.config)
        must(all(map(names.is_qualified, one.devices)), "a device that is not of CDI")


Check = Callable[[bytes, random.Random, Path], None]
# Target → check, key of WORDS, modules that it must cover.
PARSERS: dict[str, tuple[Check, str, tuple[str, ...]]] = {
    "config-json": (config_json, "json", ("gpuruntime/oci/bundle.py",)),
    "oci-state": (oci_state, "json", ("hooks/state.py",)),
    "request": (
        container_request,
        "json",
        (
            "gpuruntime/request/parse.py",
            "gpuruntime/request/container.py",
            "gpuruntime/request/driver_options.py",
        ),
    ),
    "argv": (command_line, "words", ("gpuruntime/oci/argv.py",)),
    "hook-arguments": (
        hook_arguments,
        "words",
        ("hooks/options.py", "hooks/update_container.py", "gpuruntime/system/clean_names.py"),
    ),
    "ldcache": (
        loader_cache,
        "binary",
        ("gpuruntime/formats/ldcache_merge.py", "gpuruntime/formats/ldcache.py"),
    ),
    "elf": (elf_file, "binary", ("gpuruntime/formats/elf.py",)),
    "snapshot": (
        snapshot,
        "json",
        ("gpuruntime/snapshots/inventory_json.py", "gpuruntime/probes.py"),
    ),
    "ready": (saved_grants, "json", ("gpuruntime/snapshots/grants.py",)),
    "annotations": (cdi_annotations, "json", ("cdi/annotations.py",)),
    "config-toml": (
        config_toml,
        "text",
        ("gpuruntime/configfile/check.py", "gpuruntime/configfile/lines.py"),
    ),
    "mig-minors": (mig_minors, "text", ()),
    "params": (params, "text", ()),
    "loader-files": (loader_files, "text", ("gpuruntime/system/drop_in.py",)),
    "quick": (quick_check, "json", ("cdi/quick.py",)),
    "described": (
        explained_file,
        "text",
        (
            "gpuruntime/cli/explain_input.py",
            "gpuruntime/cli/explain_compose.py",
            "gpuruntime/cli/explain_inspect.py",
            "gpuruntime/cli/explain_pods.py",
        ),
    ),
    "log": (log_text, "text", ()),
}


def target(name: str) -> Callable[[random.Random, list[Any], Path], None]:
    """Return the fuzz target of the parser *name*, with input mutated from its corpus."""
    check, words, _ = PARSERS[name]
    files = seeds(name)

    def run(rng: random.Random, texts: list[Any], place: Path) -> None:
        del texts
        check(mutated(rng, files, WORDS[words]), rng, place)

    return run
