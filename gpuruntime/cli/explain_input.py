# SPDX-License-Identifier: Apache-2.0
"""Recognise the kind of the file that `gpuruntime explain` reads, by its content.

An OCI config.json; the output of an inspect command; objects of Kubernetes, in YAML or JSON; a
compose file. Bad input is one RequestError, in bounded time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cdi import yamlio
from cdi.errors import CdiError
from gpuruntime.cli import explain_compose, explain_inspect, explain_pods
from gpuruntime.cli.explain_candidate import Candidate, choose
from gpuruntime.errors import GpuRuntimeError, RequestError
from gpuruntime.oci.bundle import MAX_DEPTH, MAX_VALUES

_BOM = b"\xef\xbb\xbf"
_HINT = (
    'give a config.json, the output of "docker inspect", a pod or another object of Kubernetes, '
    "or a compose file"
)


def candidate(
    path: str,
    data: bytes,
    container: str | None,
    image_env: Sequence[str],
    environ: Mapping[str, str],
) -> Candidate | None:
    """Return the container of the file *path* to explain; None if *data* is an OCI config itself.

    *container* is its name in the file, None for the only one. *image_env* are variables of the
    image for files that do not have them, *environ* those of the caller. Raises RequestError.
    """
    documents = _documents(path, data)
    if documents is None:
        _refuse_options(path, "is a config.json", container, image_env)
        return None
    first = documents[0]
    if explain_inspect.is_inspected(first):
        _refuse_options(path, "has the variables of the image", None, image_env)
        candidates = list(explain_inspect.candidates(first))
    elif explain_compose.is_compose(first):
        candidates = list(explain_compose.candidates(first, list(image_env), environ))
    elif all(map(explain_pods.is_object, documents)):
        candidates = list(explain_pods.candidates(documents, list(image_env)))
        if not candidates:
            raise explain_pods.no_container(documents, path)
    else:
        raise _unknown(path, "no container is described in it")
    if not candidates:
        raise _unknown(path, "it has no container")
    return choose(candidates, container, path)


def _documents(path: str, data: bytes) -> list[Any] | None:
    """Return the documents of *data*, at least one; None if it is read as an OCI config."""
    start = data.removeprefix(_BOM).lstrip()[:1]
    if not start:
        raise _unknown(path, "it is empty")
    if start in (b"{", b"["):
        document = _json(path, data, is_object=start == b"{")
        return None if document is None else [document]
    try:
        documents = yamlio.decode_documents(data.decode())
    except UnicodeDecodeError as error:
        raise _unknown(path, f"byte {error.start} is not valid UTF-8") from error
    except CdiError as error:
        raise _unknown(path, f"not valid YAML: {error.message}") from error
    documents = [document for document in documents if document is not None]
    if not documents:
        raise _unknown(path, "it is empty")
    return documents


def _json(path: str, data: bytes, *, is_object: bool) -> Any:  # noqa: ANN401 (JSON)
    """Return the document *data*; None if it is for the reader of config.json to accept or refuse.

    Whatever is an object and is not recognised is a config.json.
    """
    try:
        if sum(map(data.count, (b"[", b"{", b","))) > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values")  # noqa: TRY301 (as any other)
        document = json.loads(data.removeprefix(_BOM))
        if _is_deep(document):
            raise ValueError(f"nested deeper than {MAX_DEPTH}")  # noqa: TRY301 (as any other)
    except (ValueError, RecursionError) as error:
        if is_object:
            return None
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise _unknown(path, f"not valid JSON: {why}") from error
    kinds = (explain_inspect.is_inspected, explain_compose.is_compose, explain_pods.is_object)
    if any(is_kind(document) for is_kind in kinds):
        return document
    if is_object:
        return None
    raise _unknown(path, "the list is not the output of an inspect command")


def _is_deep(document: object) -> bool:
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for value in level
            if isinstance(value, (dict, list))
            for item in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return False
    return True


def _refuse_options(path: str, what: str, container: str | None, image_env: Sequence[str]) -> None:
    """Raise RequestError for an option that has no effect on a file that *what* says."""
    for option, is_set in (
        ("--container", container is not None),
        ("--image-env", bool(image_env)),
    ):
        if is_set:
            raise RequestError(
                f'"{option}" has no effect on "{path}", which {what}', f'leave out "{option}"'
            )


def _unknown(path: str, why: str) -> GpuRuntimeError:
    return RequestError(f'cannot explain "{path}": {why}', _HINT)
