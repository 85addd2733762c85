"""What a file is that turns up where another kind was expected, by its first bytes, and which verb takes it."""

from __future__ import annotations

from typing import Literal

Kind = Literal["kvz", "safetensors", "pickle", "zip"]

PICKLES = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))
SENTENCES: dict[Kind, str] = {
    "kvz": "is a .kvz file: kvzip decompress restores what is in it",
    "safetensors": "is a safetensors file, not a .kvz: kvzip compress makes one of it",
    "pickle": "is a pickle: kvzip import takes those of LMCache",
    "zip": "is a zip archive, as torch.save and numpy.savez make them: save the tensors as safetensors",
}


def kind_of(start: bytes) -> Kind | None:
    """What a file's first bytes say that it is: 8 tell a .kvz, 9 a safetensors file; None for what is not known."""
    if start[:4] == b"\x8bKVZ":
        return "kvz"
    if start[8:9] == b"{" and start[5:8] == b"\0\0\0":
        return "safetensors"
    if start.startswith(PICKLES):
        return "pickle"
    return "zip" if start[:4] == b"PK\x03\x04" else None


def foreign(start: bytes, expected: Kind | None = None) -> str | None:
    """``is a pickle: ...``, what a sentence about the file goes on with; None for what was expected or is not known."""
    kind = kind_of(start)
    return None if kind is None or kind == expected else SENTENCES[kind]
