"""What a file is that turns up where another kind was expected, by its first bytes, and which verb takes it."""

from __future__ import annotations

PICKLES = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))


def foreign(start: bytes) -> str | None:
    """``is a pickle: ...``, what a sentence about the file goes on with; None for what is not recognised.

    ``start`` are the file's first bytes: 8 tell a .kvz, 9 a safetensors file.
    """
    if start[:4] == b"\x8bKVZ":
        return "is a .kvz file: kvzip decompress restores what is in it"
    if start[8:9] == b"{" and start[5:8] == b"\0\0\0":
        return "is a safetensors file, not a .kvz: kvzip compress makes one of it"
    if start.startswith(PICKLES):
        return "is a pickle: kvzip import takes those of LMCache"
    if start[:4] == b"PK\x03\x04":
        return "is a zip archive, as torch.save and numpy.savez make them: save the tensors as safetensors"
    return None
