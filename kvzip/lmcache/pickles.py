"""Pickles read without being run.

A pickle is a program. This reader follows the opcodes that data needs and performs nothing: a name in a module, a call
and an object become records that say so. Any other opcode is refused, and any name that the caller has not listed.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NoReturn

from kvzip.errors import CorruptError, UnsupportedError


@dataclass(eq=False, slots=True)
class Name:
    """A name in a module, not looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Call:
    """A call, not made."""

    function: Any
    arguments: Any


@dataclass(eq=False, slots=True)
class Instance:
    """An object of a class that need not be here, and what was to be set on it."""

    kind: Any
    state: dict[Any, Any] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Reference:
    """What a pickle keeps outside itself (its persistent id)."""

    key: Any


def load(stream: io.BytesIO, names: Collection[tuple[str, str]], what: str) -> Any:
    """The value of the pickle at the stream's position, up to its end.

    Args:
        names: the (module, name) pairs that may occur.
        what: what messages call the bytes.

    Raises:
        UnsupportedError: an opcode that data has no use for (``pickle-opcode``), or another name (``pickle-global``).
        CorruptError: not a pickle, or one that contradicts itself (``pickle-damaged``).
    """
    return _Reader(names, what).run(stream)


class _Reader:
    def __init__(self, names: Collection[tuple[str, str]], what: str) -> None:
        self._names = names
        self._what = what
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, stream: io.BytesIO) -> Any:
        try:
            for opcode, argument, position in pickletools.genops(stream):
                if opcode.name == "STOP":
                    (value,) = self._stack
                    return value
                step = _STEPS.get(opcode.name)
                if step is None:
                    raise UnsupportedError(
                        f"{self._what}: the pickle uses {opcode.name} at byte {position}, which cache data has no use "
                        "for; it is not read",
                        code="pickle-opcode",
                    )
                step(self, argument)
        except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, UnicodeError) as error:
            raise self._damaged(f"{type(error).__name__}: {error}") from error
        raise self._damaged("no end")

    def _damaged(self, detail: str) -> CorruptError:
        return CorruptError(f"{self._what}: not a whole pickle ({detail})", code="pickle-damaged")

    def _fail(self, detail: str) -> NoReturn:
        raise self._damaged(detail)

    def _pop(self) -> Any:
        if self._marks and self._marks[-1] == len(self._stack):
            self._fail("takes what lies before a mark")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _memoize(self, at: int | None) -> None:
        self._memo[len(self._memo) if at is None else at] = self._stack[-1]

    def _push_name(self, module: Any, name: Any) -> None:
        if (module, name) not in self._names:
            raise UnsupportedError(
                f"{self._what}: the pickle asks for {module}.{name}, which may run code; it is not read",
                code="pickle-global",
            )
        self._push(Name(module, name))

    def _stack_global(self, _: None) -> None:
        name, module = self._pop(), self._pop()
        self._push_name(module, name)

    def _reduce(self, _: None) -> None:
        arguments, function = self._pop(), self._pop()
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            self._fail("calls what is no name")
        self._push(Call(function, arguments))

    def _new_object(self, _: None) -> None:
        arguments, kind = self._pop(), self._pop()
        if not isinstance(kind, Name) or arguments != ():
            self._fail("makes an object of what is no class, or with arguments")
        self._push(Instance(kind))

    def _build(self, _: None) -> None:
        state = self._pop()
        if not isinstance(self._stack[-1], Instance) or not isinstance(state, dict):
            self._fail("sets the state of what is no object")
        self._stack[-1].state.update(state)

    def _tuple(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self._push(tuple(reversed(items)))

    def _set_items(self, items: list[Any]) -> None:
        self._stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _set_item(self, _: None) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    def _append(self, _: None) -> None:
        item = self._pop()
        self._stack[-1].append(item)

    def _appends(self, _: None) -> None:
        items = self._pop_to_mark()
        self._stack[-1].extend(items)


_STEPS: dict[str, Callable[[_Reader, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda reader, argument: None),
    **dict.fromkeys(
        ("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"),
        _Reader._push,
    ),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), _Reader._push),
    "NONE": lambda reader, _: reader._push(None),
    "NEWTRUE": lambda reader, _: reader._push(True),
    "NEWFALSE": lambda reader, _: reader._push(False),
    "EMPTY_TUPLE": lambda reader, _: reader._push(()),
    "EMPTY_LIST": lambda reader, _: reader._push([]),
    "EMPTY_DICT": lambda reader, _: reader._push({}),
    "MARK": lambda reader, _: reader._marks.append(len(reader._stack)),
    "MEMOIZE": lambda reader, _: reader._memoize(None),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Reader._memoize),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda reader, at: reader._push(reader._memo[at])),
    "TUPLE": lambda reader, _: reader._push(tuple(reader._pop_to_mark())),
    "TUPLE1": lambda reader, _: reader._tuple(1),
    "TUPLE2": lambda reader, _: reader._tuple(2),
    "TUPLE3": lambda reader, _: reader._tuple(3),
    "APPEND": _Reader._append,
    "APPENDS": _Reader._appends,
    "SETITEM": _Reader._set_item,
    "SETITEMS": lambda reader, _: reader._set_items(reader._pop_to_mark()),
    "GLOBAL": lambda reader, argument: reader._push_name(*argument.split(" ", 1)),
    "STACK_GLOBAL": _Reader._stack_global,
    "REDUCE": _Reader._reduce,
    "NEWOBJ": _Reader._new_object,
    "BUILD": _Reader._build,
    "BINPERSID": lambda reader, _: reader._push(Reference(reader._pop())),
}
