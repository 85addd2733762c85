"""Safetensors in and out: files, folders, pipes and arrays, with the exact header bytes kept."""

from kvzip.tensorfile.header import (
    DTYPES,
    TAGS,
    SourceFile,
    TensorInfo,
    header_bytes,
    parse_header,
    tensors_of,
)
from kvzip.tensorfile.sink import ArraySink, TensorSink, open_sink
from kvzip.tensorfile.source import TensorSource, arrays_header, from_arrays, open_raw, open_tensors

__all__ = [
    "DTYPES",
    "TAGS",
    "ArraySink",
    "SourceFile",
    "TensorInfo",
    "TensorSink",
    "TensorSource",
    "arrays_header",
    "from_arrays",
    "header_bytes",
    "open_raw",
    "open_sink",
    "open_tensors",
    "parse_header",
    "tensors_of",
]
