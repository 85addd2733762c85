"""The ``.kvz`` container: writer, random reader, stream reader, recovery. ``docs/format.md`` is normative."""

from kvzip.container.format import MAGIC, VERSION
from kvzip.container.frames import Bound, Embedded, Frame
from kvzip.container.header import Header
from kvzip.container.index import Entry, Index, Totals
from kvzip.container.reader import FrameReader, Reader, Span, find_members
from kvzip.container.recovery import Lost, Recovery, recover
from kvzip.container.source import Source
from kvzip.container.stream import StreamReader, read_members
from kvzip.container.writer import Writer

__all__ = [
    "MAGIC",
    "VERSION",
    "Bound",
    "Embedded",
    "Entry",
    "Frame",
    "FrameReader",
    "Header",
    "Index",
    "Lost",
    "Reader",
    "Recovery",
    "Source",
    "Span",
    "StreamReader",
    "Totals",
    "Writer",
    "find_members",
    "read_members",
    "recover",
]
