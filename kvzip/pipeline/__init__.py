"""The road itself: slabs into batches, a bounded queue between reading, coding and writing."""

from kvzip.pipeline.assignment import Assignment, Choice, assign
from kvzip.pipeline.decoding import Discard, collect, decode_plane, decompress, verify
from kvzip.pipeline.encoding import compress
from kvzip.pipeline.report import PlaneErrors, Report
from kvzip.pipeline.stored import StoredCache

__all__ = [
    "Assignment",
    "Choice",
    "Discard",
    "PlaneErrors",
    "Report",
    "StoredCache",
    "assign",
    "collect",
    "compress",
    "decode_plane",
    "decompress",
    "verify",
]
