"""PTX into C++ for the emulator: one statement per instruction, every register a variable.

What NVRTC gives is run here as it is given to the driver, so its instructions are tested and not only the source. What
is not known raises: nothing is guessed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from itertools import pairwise
from pathlib import Path

from tests.emulator import building
from tests.emulator.instructions import REGISTERS, SIZES, TYPES, Instructions, label, parsed, register
from tests.emulator.module import Module
from tools import nvrtc

SHARED_LIMIT = 48 << 10
"""Bytes of shared memory that a block gets without asking for more, on every architecture."""

_VARIABLE = r"\.(?:global|const)\s+\.align\s+(\d+)\s+\.(\w+)\s+(\w+)(?:\[(\d+)\])?(?:\s*=\s*\{?([\w\s,.-]*)\}?)?"
_PARAMETER = (
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+"
    r"(?:\.ptr\s+(?:\.\w+\s+)*?(?:\.align\s+\d+\s+)?)?(\w+)(?:\[(\d+)\])?"
)


class UnknownPtxError(NotImplementedError):
    """An instruction, operand or directive that the translator does not know."""


def module(source: str, name: str, architecture: str) -> Module:
    """The kernels of CUDA C++ ``source``, through the PTX that NVRTC makes for ``architecture``."""

    def compile_to(path: Path) -> None:
        path.write_text(nvrtc.compile_source(source, name, architecture.replace("sm", "compute")).ptx)

    key = "\0".join((source, architecture, *nvrtc.OPTIONS, metadata.version("nvidia-cuda-nvrtc")))
    ptx = building.kept(name, key, ".ptx", compile_to)
    return Module(building.from_translation(translate(ptx.read_text()), f"ptx-{name}"))


def translate(ptx: str) -> str:
    """C++ for the emulator from a PTX module. Architectures for which NVRTC makes the same code give the same C++.

    Raises:
        UnknownPtxError: something in it is not known; the message quotes it.
    """
    ptx = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL)
    parts = ['#include "ptx.h"\nnamespace emulator {\n']
    symbols: dict[str, str] = {}
    at = 0
    for entry in re.finditer(r"\.visible\s+\.entry\s+(\w+)\s*\((.*?)\)[^{]*\{", ptx, re.DOTALL):
        end = _closing(ptx, entry.end())
        parts += _variables(ptx[at : entry.start()], symbols)
        parts.append(_Kernel(entry[1], entry[2], ptx[entry.end() : end], symbols).text())
        at = end + 1
    parts += _variables(ptx[at:], symbols)
    return "\n".join([*parts, "}  // namespace emulator\n"])


def _closing(text: str, at: int) -> int:
    """Where the brace closes that was opened before ``at``."""
    depth = 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return at - 1


def _variables(text: str, symbols: dict[str, str]) -> Iterator[str]:
    """The variables of a module: constants, as far as kernels here have any."""
    for statement in text.split(";"):
        statement = re.sub(r"\.(version|target|address_size)\b[^\n]*", "", statement).strip()
        if not statement:
            continue
        found = re.fullmatch(_VARIABLE, statement)
        if not found:
            raise UnknownPtxError(f"directive {statement!r}")
        align, kind, name, count, values = found.groups()
        symbols[name] = f"(u64)global_{name}"
        element = TYPES[kind].replace("float", "u32").replace("double", "u64")
        bits = [re.sub(r"^0[fFdD](?=[0-9A-Fa-f]{8})", "0x", value.strip()) for value in (values or "0").split(",")]
        numbers = ", ".join(f"({element})({value})" for value in bits)
        yield f"alignas({align}) static const {element} global_{name}[{count or 1}] = {{{numbers}}};"


def _statements(body: str) -> list[str]:
    """Without debug information; labels are statements of their own, scopes, as inline assembly opens, are none."""
    body = re.sub(r"^\s*\.(loc|file|pragma)\b[^\n]*$", "", body, flags=re.MULTILINE)
    pieces = re.split(r";|(?<=:)\s|[{}](?=\s*\n)", re.sub(r"(\$\w+):", r"\n\1: ", body))
    return [" ".join(piece.split()) for piece in pieces if piece.strip()]


class _Kernel(Instructions):
    """One entry point, translated statement by statement."""

    def __init__(self, name: str, parameters: str, body: str, symbols: dict[str, str]) -> None:
        super().__init__(symbols)
        self.name = name
        self.declarations: list[str] = []
        self.lines: list[str] = []
        self.shared = 0
        for parameter in filter(None, (text.strip() for text in parameters.split(","))):
            found = re.fullmatch(_PARAMETER, parameter)
            if not found:
                raise UnknownPtxError(f"parameter {parameter!r}")
            self.parameters[found[2]] = SIZES[TYPES[found[1]]] * int(found[3] or 1)
        statements = _statements(body)
        for name_of_table, statement in pairwise(statements):
            if statement.startswith(".branchtargets"):
                targets = statement.removeprefix(".branchtargets").split(",")
                self.branches[name_of_table.rstrip(":")] = [target.strip() for target in targets]
        for statement in statements:
            self._statement(statement)
        if self.shared > SHARED_LIMIT:
            raise UnknownPtxError(f"{name} takes {self.shared} bytes of shared memory, a block gets {SHARED_LIMIT}")

    def text(self) -> str:
        shared, sizes = f"shared_{self.name}", ", ".join(map(str, self.parameters.values()))
        code = "\n  ".join([*self._declared_registers(), *self.declarations, *self.lines])
        return f"""
alignas(128) static u8 {shared}[{max(self.shared, 1)}];
static void enter_{self.name}(void** parameters) {{
  const u64 shared = (u64){shared};
  {code}
}}
extern "C" __attribute__((visibility("default"))) void describe_{self.name}(Kernel* kernel) {{
  *kernel = {{enter_{self.name}, {shared}, {self.shared}, {len(self.parameters)}, {{{sizes}}}}};
}}"""

    # ------------------------------------------------------------------------------------------ statements

    def _statement(self, statement: str) -> None:
        if statement.endswith(":"):
            self.lines.append(f"{label(statement[:-1])}:;")
        elif statement.startswith(".reg"):
            self._declare_registers(statement)
        elif statement.startswith((".shared", ".local")):
            self._declare_memory(statement)
        elif statement.startswith(".branchtargets"):
            pass
        elif statement.startswith("."):
            raise UnknownPtxError(f"directive {statement!r}")
        else:
            guard, instruction = parsed(r"(?:@(!?%\w+) )?(.*)", statement)
            try:
                code = self.instruction(instruction)
            except (KeyError, IndexError, ValueError) as error:
                raise UnknownPtxError(f"instruction {statement!r}") from error
            self.lines.append(f"if ({self.value(guard, 'bool')}) {{ {code} }}" if guard else code)

    def _declare_registers(self, statement: str) -> None:
        _, kind, names = statement.split(None, 2)
        type_ = REGISTERS[kind[1:]]
        for name in names.split(","):
            found = re.fullmatch(r"(%[\w$]+?)(?:<(\d+)>)?", name.strip())
            each = [f"{found[1]}{i}" for i in range(int(found[2]))] if found[2] else [found[1]]
            self.registers.update(dict.fromkeys(each, type_))

    def _declared_registers(self) -> Iterator[str]:
        """The registers that are used. Those that one instruction writes, always, need no value before: a
        compiler is done with them much sooner.
        """
        written, guarded = Counter[str](), set[str]()
        for line in self.lines:
            here = re.findall(r"\bset\((\w+),", line)
            written.update(here)
            if line.startswith("if "):
                guarded.update(here)
        used = set(re.findall(r"\breg_\w+", "\n".join(self.lines)))
        for name, type_ in self.registers.items():
            if register(name) in used:
                once = written[register(name)] == 1 and register(name) not in guarded
                yield f"{type_} {register(name)}{'' if once else ' = 0'};"

    def _declare_memory(self, statement: str) -> None:
        space, align, name, size = parsed(r"\.(\w+) \.align (\d+) \.b8 ([\w$]+)\[(\d+)\]", statement)
        if space == "shared":
            start = -(-self.shared // int(align)) * int(align)
            self.symbols[name] = f"{start}ull"
            self.shared = start + int(size)
        else:
            self.declarations.append(f"alignas({align}) u8 local_{name}[{size}];")
            self.symbols[name] = f"(u64)local_{name}"
