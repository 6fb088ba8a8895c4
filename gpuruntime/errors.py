# SPDX-License-Identifier: Apache-2.0
"""The exceptions that end a command with a message for the user; imports nothing.

Each class names the phase in which the work stopped. The phase words are those that operators
already search for in their logs.
"""

from __future__ import annotations


class GpuRuntimeError(Exception):
    """A requested action failed; *message* says which and why, *hint* what the user can do."""

    phase = "runtime"
    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.phase}: {self.message}"

    def lines(self) -> str:
        """Return the message and, on a second line, the hint."""
        text = escape(str(self))
        return f"{text}\nhint: {escape(self.hint)}" if self.hint else text


class ConfigError(GpuRuntimeError):
    """The config file, its snapshot or an option cannot be used."""

    phase = "configuration"


class ArgumentError(ConfigError):
    """An argument of the command line has a value that is not allowed."""

    exit_code = 2


class RequestError(GpuRuntimeError):
    """A request of the container or the engine is malformed or not permitted."""

    phase = "request"


class RequirementError(RequestError):
    """The host does not meet a requirement of the image."""

    phase = "requirement"


class BundleError(GpuRuntimeError):
    """The bundle's config.json is ambiguous, cannot be read or cannot be replaced."""

    phase = "bundle"


class UnresolvedDeviceError(GpuRuntimeError):
    """A requested device does not exist or is not available."""

    phase = "device"


class DriverError(GpuRuntimeError):
    """The driver is not installed or does not respond."""

    phase = "initialization"


class DiscoveryError(GpuRuntimeError):
    """The driver responds, but its files or device nodes are missing."""

    phase = "detection"


class SpecError(GpuRuntimeError):
    """A CDI spec is invalid, or in conflict with another."""

    phase = "spec"


class MountError(GpuRuntimeError):
    """An operation below the container's root failed."""

    phase = "mount"


class LdcacheError(GpuRuntimeError):
    """The loader cache cannot be read or written."""

    phase = "ldcache"


class RuntimeExecError(GpuRuntimeError):
    """The low-level runtime is missing (127) or not executable (126)."""

    phase = "runtime"

    def __init__(self, message: str, hint: str | None = None, exit_code: int = 127) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


# The errors that `missing-gpu = "warn"` turns into warnings. The error for a device that exists
# but is not permitted is not one of them.
MISSING_DEVICE_ERRORS = (UnresolvedDeviceError, DriverError, DiscoveryError, SpecError)


def bug(error: Exception) -> GpuRuntimeError:
    """Return the error for the user for the unexpected exception *error*."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = f" at {frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame else ""
    return GpuRuntimeError(
        f"this is a bug: {type(error).__name__}{where}: {error}",
        "report it with this line and the container's config.json",
    )


MAX_MESSAGE_CHARS = 4096


def escape(text: str) -> str:
    r"""Return *text* as one line of printable ASCII of bounded length (others become \xNN).

    Names in messages may come from an image or a pod: they must not forge log lines.
    """
    if len(text) > MAX_MESSAGE_CHARS:
        text = text[:MAX_MESSAGE_CHARS] + "..."
    if text.isascii() and text.isprintable():
        return text
    data = text.encode("utf-8", "surrogateescape" if _is_lossless(text) else "replace")
    return "".join(chr(b) if 0x20 <= b < 0x7F else f"\\x{b:02x}" for b in data)


def _is_lossless(text: str) -> bool:
    return not any(0xD800 <= ord(c) < 0xDC80 or 0xDD00 <= ord(c) < 0xE000 for c in text)
