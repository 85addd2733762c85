"""Pickles of the records of :mod:`kvzip.lmcache.pickles`, byte for byte what Python's own pickler writes for what they
stand for.

Source: PEP 307 (protocol 2), PEP 3154 (protocol 4: frames) and the order in which CPython's pickler works.
"""

from __future__ import annotations

import struct
from typing import Any

from kvzip.lmcache.pickles import Call, Instance, Name, Reference

FRAME_TARGET = 64 << 10
"""A frame ends before the next value once it is as long as this; longer byte strings stand outside of frames."""


def dump(value: Any, protocol: int) -> bytes:
    """``value`` as a pickle of protocol 2 or 4: records, None, bools, ints, texts, bytes, tuples, lists and dicts.

    An object met again is written as a reference, as the pickler does: two equal texts are the same if they are one
    object.
    """
    writer = _Writer(protocol)
    writer.save(value)
    return writer.finish()


class _Writer:
    def __init__(self, protocol: int) -> None:
        self._modern = protocol >= 4
        self._done = bytearray(b"\x80" + bytes([protocol]))
        self._frame = bytearray()
        # The memo keeps its objects, so that no other can get the id of one.
        self._memo: dict[int, tuple[int, Any]] = {}

    def finish(self) -> bytes:
        self._frame += b"."
        self._end_frame()
        return bytes(self._done)

    def save(self, value: Any) -> None:
        if self._modern and len(self._frame) >= FRAME_TARGET:
            self._end_frame()
        if id(value) in self._memo:
            at = self._memo[id(value)][0]
            self._frame += b"h" + bytes([at]) if at < 256 else b"j" + struct.pack("<I", at)
            return
        match value:
            case None | bool():
                self._frame += {None: b"N", True: b"\x88", False: b"\x89"}[value]
            case int():
                self._integer(value)
            case str():
                self._text(value)
            case bytes() if self._modern:
                self._bytes(value)
            case tuple():
                self._tuple(value)
            case list():
                self._list(value)
            case dict():
                self._dict(value)
            case Name():
                self._name(value)
            case Call():
                self.save(value.function)
                self.save(value.arguments)
                self._frame += b"R"
                self._memoize(value)
            case Instance():
                self.save(value.kind)
                self.save(())
                self._frame += b"\x81"
                self._memoize(value)
                self.save(value.state)
                self._frame += b"b"
            case Reference():
                self.save(value.key)
                self._frame += b"Q"
            case _:
                raise TypeError(f"no pickle for {type(value).__name__}")

    def _end_frame(self) -> None:
        # A frame of three bytes or less is not worth its header.
        if self._modern and len(self._frame) >= 4:
            self._done += b"\x95" + struct.pack("<Q", len(self._frame))
        self._done += self._frame
        self._frame.clear()

    def _memoize(self, value: Any) -> None:
        at = len(self._memo)
        self._memo[id(value)] = at, value
        if self._modern:
            self._frame += b"\x94"
        else:
            self._frame += b"q" + bytes([at]) if at < 256 else b"r" + struct.pack("<I", at)

    def _integer(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self._frame += b"K" + struct.pack("<B", value)
        elif 0 <= value < 1 << 16:
            self._frame += b"M" + struct.pack("<H", value)
        elif -(1 << 31) <= value < 1 << 31:
            self._frame += b"J" + struct.pack("<i", value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self._frame += b"\x8a" + bytes([len(data)]) + data

    def _text(self, value: str) -> None:
        data = value.encode()
        short = self._modern and len(data) < 256
        self._frame += (b"\x8c" + bytes([len(data)]) if short else b"X" + struct.pack("<I", len(data))) + data
        self._memoize(value)

    def _bytes(self, value: bytes) -> None:
        if len(value) < 256:
            self._frame += b"C" + bytes([len(value)]) + value
        else:
            header = (
                b"B" + struct.pack("<I", len(value))
                if len(value) < 1 << 32
                else b"\x8e" + struct.pack("<Q", len(value))
            )
            if len(value) < FRAME_TARGET:
                self._frame += header + value
            else:
                self._end_frame()
                self._done += header + value
        self._memoize(value)

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if not value:
            self._frame += b")"
            return
        if len(value) > 3:
            self._frame += b"("
        for item in value:
            self.save(item)
        self._frame += {1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(value), b"t")
        self._memoize(value)

    def _list(self, value: list[Any]) -> None:
        self._frame += b"]"
        self._memoize(value)
        for start in range(0, len(value), 1000):
            batch = value[start : start + 1000]
            if len(batch) > 1:
                self._frame += b"("
            for item in batch:
                self.save(item)
            self._frame += b"e" if len(batch) > 1 else b"a"

    def _dict(self, value: dict[Any, Any]) -> None:
        self._frame += b"}"
        self._memoize(value)
        if not value:
            return
        if len(value) > 1:
            self._frame += b"("
        for key, item in value.items():
            self.save(key)
            self.save(item)
        self._frame += b"u" if len(value) > 1 else b"s"

    def _name(self, value: Name) -> None:
        if self._modern:
            self.save(value.module)
            self.save(value.name)
            self._frame += b"\x93"
        else:
            self._frame += f"c{value.module}\n{value.name}\n".encode()
        self._memoize(value)
