"""Options that several verbs share, and what they mean together."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from kvzip.cli.messages import Messages
from kvzip.cli.progress import ProgressStyle, Update, progress
from kvzip.errors import KvzipError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from kvzip.devices import Device
    from kvzip.tensorfile import TensorSource

Span = slice | None
"""The value of ``--layers`` and ``--tokens``."""


def file_name(text: str) -> str:
    """A name as it is given. An empty one is no file's; Python would take it for the current folder."""
    if not text:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)
    return text


def file_option(*names: str, about: str, metavar: str = "FILE") -> Any:
    """An option that names a file."""
    return typer.Option(*names, metavar=metavar, help=about, parser=file_name)


Files = Annotated[list[str] | None, typer.Argument(metavar="FILE", help="Inputs; '-' or none is standard input.")]
Output = Annotated[
    str | None, file_option("-o", "--output", about="Write here, with one input; '-' is standard output.")
]
Stdout = Annotated[bool, typer.Option("-c", "--stdout", help="Write to standard output.")]
Force = Annotated[bool, typer.Option("-f", "--force", help="Overwrite files; write binary data to a terminal.")]
Keep = Annotated[bool, typer.Option("-k", "--keep", help="Keep the input (always so unless --rm is given).")]
Remove = Annotated[
    bool, typer.Option("--rm", help="Remove an input once its output is on disk and has been read back.")
]
Sync = Annotated[bool, typer.Option("--sync", help="Return only when the output is on disk.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Say nothing but errors.")]
Verbose = Annotated[int, typer.Option("-v", "--verbose", count=True, show_default=False, help="Say more.")]
Progress = Annotated[
    ProgressStyle,
    typer.Option("--progress", help="A bar on a terminal (auto), JSON lines on standard error, or none."),
]
Threads = Annotated[
    int | None, typer.Option("-T", "--threads", metavar="N", min=0, help="CPU threads; 0 or none given: all.")
]
DeviceName = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N. The bytes are the same.")
]
LayoutName = Annotated[
    str | None,
    typer.Option("--layout", metavar="LAYOUT", help="Name or declaration, as in 'L,kv,T,H,D'; else detected."),
]
Heads = Annotated[int | None, typer.Option("--heads", metavar="N", min=1, help="KV heads, where shapes do not say.")]
HeadDim = Annotated[
    int | None, typer.Option("--head-dim", metavar="N", min=1, help="Channels of a head, in place of --heads.")
]
Shape = Annotated[
    str | None,
    typer.Option("--shape", metavar="N,N,...", help="Of files of raw bytes: the tensor's axes; see --dtype."),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="NAME", help="Of files of raw bytes, with --shape: bfloat16 (default), float16..."),
]
ProfilePlace = Annotated[
    str | None, file_option("--profile", about="The profile that a file needs, or a folder of them.")
]
Member = Annotated[
    int | None, typer.Option("--member", metavar="N", min=0, help="Which cache of a file that holds several; from 0.")
]


def inputs_of(files: list[str] | None) -> list[str]:
    """The inputs, standard input if there are none. Raises ``UsageError`` for a terminal: nobody types a cache."""
    names = [file_name(name) for name in files or ["-"]]
    if "-" in names and sys.stdin.isatty():
        raise UsageError("nothing to read: name a FILE, or pipe one in", code="no-input")
    if names.count("-") > 1:
        raise UsageError("standard input can be read only once", code="no-input")
    return names


@dataclass(frozen=True)
class Job:
    """How a verb is to run: who is told, on which device, with how many threads."""

    messages: Messages
    style: ProgressStyle = ProgressStyle.AUTO
    device_name: str = "auto"
    threads: int | None = None

    @classmethod
    def of(
        cls,
        quiet: bool,
        verbose: int,
        style: ProgressStyle = ProgressStyle.AUTO,
        device: str = "auto",
        threads: int | None = None,
    ) -> Job:
        """From the values of the options; threads as in ``zstd -T0``: 0 means all."""
        return cls(Messages(quiet, verbose, as_json=style is ProgressStyle.JSON), style, device, threads or None)

    @cached_property
    def device(self) -> Device:
        """The device, found when it is first needed. ``auto`` says that it took a GPU, or why it could not take one."""
        from kvzip.devices import get_device

        device = None
        if self.device_name == "auto" and Path("/dev/nvidiactl").exists():
            try:
                device = get_device("cuda")
            except UnsupportedError as error:
                self.messages.notice(f"the CPU is used in place of the GPU: {error}")
                device = get_device("cpu", self.threads)
        device = device or get_device(self.device_name, self.threads)
        tell = self.messages.notice if self.device_name == "auto" and device.name == "cuda" else self.messages.detail
        tell(f"running on {device}")
        return device

    def progress(self, verb: str, name: str, total: Callable[[], int | None]) -> AbstractContextManager[Update]:
        """What to tell how many more bytes are done; ``total`` is asked only if somebody looks."""
        return progress(verb, name, self.style, self.messages, total)


def span_of(text: str | None, option: str) -> Span:
    """``a:b``, ``a:``, ``:b`` or ``a`` (just that one) as a slice; None if not given."""
    if text is None:
        return None
    low, colon, high = text.partition(":")
    try:
        start = int(low) if low else 0
        stop = int(high) if high else None
    except ValueError:
        start, stop = -1, None
    if not colon:
        stop = start + 1
    if start < 0 or not text or (stop is not None and stop <= start):
        raise UsageError(
            f"{option} {text!r}: expected a range such as 0:16, 16: or :256, the end not included", code="bad-range"
        )
    return slice(start, stop)


def offer(profile: str | None) -> AbstractContextManager[None]:
    """Within the block, files that need a profile find it in the value of ``--profile``, if there is one."""
    from kvzip.profiles.library import offering

    return offering([profile] if profile is not None else [])


@contextmanager
def open_input(name: str) -> Iterator[tuple[io.BufferedReader | None, str]]:
    """An input that may be a file, a pipe or (None) a folder, and what messages call it."""
    if name == "-":
        yield cast(io.BufferedReader, sys.stdin.buffer), "standard input"
    elif Path(name).is_dir():
        yield None, name
    else:
        with Path(name).open("rb") as file:
            yield file, name


@contextmanager
def raw_or_named(name: str, shape: str | None, dtype: str | None) -> Iterator[str | TensorSource]:
    """A source of tensors: the file as its own header tells, or its raw bytes as one tensor of the given shape."""
    if shape is None:
        if dtype is not None:
            raise UsageError("--dtype: only with --shape, of files of raw bytes", code="raw-shape")
        yield name
        return
    from kvzip.tensorfile import open_raw

    if name == "-":
        raise UsageError("--shape needs a file: raw bytes from a pipe have no length to compare with", code="raw-shape")
    try:
        axes = [int(axis) for axis in shape.split(",")]
    except ValueError:
        axes = []
    if not axes or min(axes) < 0:
        raise UsageError(
            f"--shape: cannot read {shape!r}; write the lengths of the axes, as in 2,32,256,1024", code="raw-shape"
        )
    with open_raw(name, axes, dtype or "bfloat16") as source:
        yield source


def restored_size(name: str, layers: Span = None, tokens: Span = None) -> int | None:
    """Bytes of the tensors that a ``.kvz`` file, or a part of it, restores; None for pipes and what cannot be read."""
    from kvzip.api import as_range
    from kvzip.opening import open_stored

    if not Path(name).is_file():
        return None
    try:
        with open_stored(name, 0) as stored:
            selection = stored.select(as_range(layers, "layers"), as_range(tokens, "tokens"))
            return sum(tensor.nbytes for tensor in selection.tensors)
    except (KvzipError, OSError):
        return None


def check_plot(plot: str, inputs: Sequence[str], force: bool) -> None:
    """Refuse a picture that cannot be drawn or written, before any work is done."""
    from kvzip.output import check_target
    from kvzip.plots import check_plot

    if len(inputs) > 1:
        raise UsageError(f"{len(inputs)} inputs cannot go into one picture; leave out --plot", code="many-to-one")
    check_plot(plot)
    check_target(Path(plot), force=force, sources=inputs)
