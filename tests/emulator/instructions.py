"""PTX's instructions, one by one, as statements of C++ on ``ptx.h``.

Semantics are those of NVIDIA's "PTX ISA". Whatever is not in the tables here raises KeyError or ValueError.
"""

from __future__ import annotations

import re

TYPES = {
    **{f"b{bits}": f"u{bits}" for bits in (8, 16, 32, 64)},
    **{f"u{bits}": f"u{bits}" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
    "f32": "float",
    "f64": "double",
    "f16": "u16",
    "bf16": "u16",
    "f16x2": "u32",
    "bf16x2": "u32",
    "pred": "bool",
}
REGISTERS = {"pred": "bool", **{f"{kind}{bits}": f"u{bits}" for kind in "busf" for bits in (16, 32, 64)}}
SIZES = {"u8": 1, "i8": 1, "u16": 2, "i16": 2, "u32": 4, "i32": 4, "u64": 8, "i64": 8, "float": 4, "double": 8}

# Operations whose operands are all of the instruction's type T, but n, m and k: 32-bit numbers.
_OPERATIONS = {
    **dict.fromkeys(("add", "add.rn"), "number((T)(a + b))"),
    **dict.fromkeys(("sub", "sub.rn"), "number((T)(a - b))"),
    "mul": "number(a * b)",
    "mul.rn": "number(a * b)",
    "div.rn": "number(a / b)",
    "rcp.rn": "number((T)1 / a)",
    "sqrt.rn": "number(square_root(a))",
    "mul.lo": "(T)(a * b)",
    "mul.hi": "high(a, b)",
    "mul.wide": "wide(a) * wide(b)",
    "mad.lo": "(T)(a * b + c)",
    "mad.hi": "(T)(high(a, b) + c)",
    "mad.wide": "wide(a) * wide(b) + as<Wide<T>>(C)",
    "div": "quotient(a, b)",
    "rem": "remainder(a, b)",
    "neg": "(T)-a",
    "abs": "magnitude(a)",
    "min": "smaller(a, b)",
    "max": "larger(a, b)",
    "max.NaN": "larger_or_nan(a, b)",
    "min.f16x2": "pairwise<from_half, to_half, smaller>(a, b)",
    "max.f16x2": "pairwise<from_half, to_half, larger>(a, b)",
    "min.bf16x2": "pairwise<from_bfloat, to_bfloat, smaller>(a, b)",
    "max.bf16x2": "pairwise<from_bfloat, to_bfloat, larger>(a, b)",
    "fma.rn": "number(fused(a, b, c))",
    "and": "(T)(a & b)",
    "or": "(T)(a | b)",
    "xor": "(T)(a ^ b)",
    "not": "inverted(a)",
    "cnot": "(T)(a == 0)",
    "shl": "shift_left(a, n)",
    "shr": "shift_right(a, n)",
    "shf.l.wrap": "funnel_left(a, b, c & 31)",
    "shf.r.wrap": "funnel_right(a, b, c & 31)",
    "shf.l.clamp": "funnel_left(a, b, smaller(c, 32u))",
    "shf.r.clamp": "funnel_right(a, b, smaller(c, 32u))",
    "clz": "leading_zeros(a)",
    "popc": "(u32)__builtin_popcountll(a)",
    "brev": "reversed(a)",
    "bfind": "highest_bit(a)",
    "bfe": "extract_bits(a, n, m)",
    "bfi": "insert_bits(a, b, m, k)",
    "prmt": "permuted_bytes(a, b, c)",
    "lop3": "lookup3(a, b, c, k)",
    "selp": "as<bool>(C) ? a : b",
    "mov": "a",
}
# The operand that n, m and k stand for, counted from 0 behind the destination.
_NUMBERS = {"n": 1, "m": 2, "k": 3}

_PLACEHOLDER = r"\b[TabcCnmk]\b"

_COMPARISONS = {
    "eq": "a == b",
    "ne": "a < b || a > b",
    "lt": "a < b",
    "le": "a <= b",
    "gt": "a > b",
    "ge": "a >= b",
    "lo": "a < b",
    "ls": "a <= b",
    "hi": "a > b",
    "hs": "a >= b",
    # The unordered ones hold for what is no number, too.
    "equ": "!(a < b || a > b)",
    "neu": "!(a == b)",
    "ltu": "!(a >= b)",
    "leu": "!(a > b)",
    "gtu": "!(a <= b)",
    "geu": "!(a < b)",
    "num": "a == a && b == b",
    "nan": "a != a || b != b",
}
_LOGIC = {"and": "&&", "or": "||", "xor": "!="}
_ROUNDINGS = {"rni": "nearest", "rzi": "towards_zero", "rmi": "downwards", "rpi": "upwards"}
_SHUFFLES = {"up": "UP", "down": "DOWN", "bfly": "BUTTERFLY", "idx": "INDEX"}
_VOTES = {"ballot": "{}", "any": "{} != 0", "all": "{} == ~0u", "uni": "all_or_none({})"}
_COMBINATIONS = {"add": "ADD", "min": "MIN", "max": "MAX", "and": "AND", "or": "OR", "xor": "XOR", "exch": "EXCHANGE"}
_SPECIAL = {
    "%tid.x": "emulator_thread()",
    "%ctaid.x": "emulator_block()",
    "%ntid.x": "emulator_threads()",
    "%nctaid.x": "emulator_blocks()",
    "%laneid": "lane_index()",
    "%lanemask_lt": "((1u << lane_index()) - 1)",
    "WARP_SZ": "32u",
    **{f"%{name}.{axis}": value for name, value in (("tid", "0u"), ("ctaid", "0u"), ("ntid", "1u")) for axis in "yz"},
}
# Said of loads, stores and atomics; none changes what is read or written here.
_HINTS = {
    "global",
    "const",
    "nc",
    "ca",
    "cg",
    "cs",
    "cv",
    "lu",
    "wb",
    "wt",
    "volatile",
    "relaxed",
    "weak",
    "cta",
    "gpu",
    "sys",
}


class Instructions:
    """What an instruction means, in a kernel of these registers, parameters and variables.

    Attributes:
        registers: the C++ type of each register.
        parameters: the size of each parameter, in order.
        symbols: an expression for the address of each variable.
        branches: the labels of each table of branches.
    """

    def __init__(self, symbols: dict[str, str]) -> None:
        self.symbols = dict(symbols)
        self.registers: dict[str, str] = {}
        self.parameters: dict[str, int] = {}
        self.branches: dict[str, list[str]] = {}

    def instruction(self, instruction: str) -> str:
        opcode, _, rest = instruction.partition(" ")
        operands = [operand.strip() for operand in re.split(r",(?![^{]*\})(?![^\[]*\])", rest)] if rest else []
        name, *modifiers = opcode.split(".")
        special = getattr(self, f"_{name}", None)
        if special is not None:
            return special(modifiers, operands)
        return self._operation(name, modifiers, operands)

    def _operation(self, name: str, modifiers: list[str], operands: list[str]) -> str:
        kind = TYPES[modifiers[-1]]
        # Of pairs, the type is a part of the name.
        template = _OPERATIONS[".".join([name, *modifiers[: None if modifiers[-1].endswith("x2") else -1]])]
        if modifiers[-1] in ("f16", "bf16"):
            raise KeyError(name)
        destination, *inputs = operands

        def operand(found: re.Match[str]) -> str:
            letter = found[0]
            if letter == "T":
                return kind
            if letter in _NUMBERS:
                return self.value(inputs[_NUMBERS[letter]], "u32")
            raw = inputs["abc".index(letter.lower())]
            return self._raw(raw) if letter.isupper() else self.value(raw, kind)

        return f"set({self._destination(destination)}, {re.sub(_PLACEHOLDER, operand, template)});"

    def _setp(self, modifiers: list[str], operands: list[str]) -> str:
        kind = TYPES[modifiers[-1]]
        a, b = (self.value(operand, kind) for operand in operands[1:3])
        test = "(" + re.sub(r"\b[ab]\b", lambda found: a if found[0] == "a" else b, _COMPARISONS[modifiers[0]]) + ")"
        both = [test, f"!{test}"]
        if len(modifiers) == 3:
            both = [f"{one} {_LOGIC[modifiers[1]]} {self.value(operands[3], 'bool')}" for one in both]
        pairs = zip(operands[0].split("|"), both, strict=False)
        return " ".join(f"set({self._destination(to)}, {value});" for to, value in pairs)

    def _mov(self, modifiers: list[str], operands: list[str]) -> str:
        (kind,) = modifiers
        destination, source = operands
        bits = 8 * SIZES[TYPES[kind]] if kind != "pred" else 1
        if source.startswith("{"):
            parts = _elements(source)
            each = bits // len(parts)
            joined = " | ".join(f"(u64){self.value(part, f'u{each}')} << {each * i}" for i, part in enumerate(parts))
            return f"set({self._destination(destination)}, (u{bits})({joined}));"
        if destination.startswith("{"):
            parts = _elements(destination)
            each = bits // len(parts)
            values = [f"(u{each})({self.value(source, f'u{bits}')} >> {each * i})" for i in range(len(parts))]
            pairs = list(zip(parts, values, strict=True))
            return "{ " + " ".join(
                [f"u{each} part{i} = {value};" for i, (_, value) in enumerate(pairs)]
                + [f"set({self._destination(part)}, part{i});" for i, (part, _) in enumerate(pairs) if part != "_"]
            ) + " }"  # fmt: skip
        return self._operation("mov", modifiers, operands)

    def _cvt(self, modifiers: list[str], operands: list[str]) -> str:
        *how, to, source = modifiers
        x = self.value(operands[1], TYPES[source])
        if (how, source) == (["rn"], "f32") and to in ("f16x2", "bf16x2"):
            low, of = self.value(operands[2], "float"), "to_half" if to == "f16x2" else "to_bfloat"
            return f"set({self._destination(operands[0])}, (u32){of}({x}) << 16 | {of}({low}));"
        floats = {"f64", "f32", "f16", "bf16"}
        x = {"f16": f"from_half({x})", "bf16": f"as<float>((u32){x} << 16)"}.get(source, x)
        match (to in floats, source in floats, how):
            case (False, False, []):
                result = f"({TYPES[to]}){x}"
            case (True, False, ["rn"]) if to in ("f32", "f64"):
                result = f"({TYPES[to]}){x}"
            case (False, True, [rounding]) if source == "f32":
                result = f"saturated<{TYPES[to]}>({_ROUNDINGS[rounding]}({x}))"
            case (True, True, []) if to == "f32":
                result = f"number({x})"
            case (True, True, ["rn"]) if (to, source) == ("f32", "f64"):
                result = f"number((float){x})"
            case (True, True, ["rn"]) if to in ("f16", "bf16"):
                result = f"{'to_half' if to == 'f16' else 'to_bfloat'}({x})"
            case (True, True, [rounding]) if to == source == "f32":
                result = f"number({_ROUNDINGS[rounding]}({x}))"
            case _:
                raise KeyError("cvt")
        return f"set({self._destination(operands[0])}, {result});"

    def _cvta(self, modifiers: list[str], operands: list[str]) -> str:
        to, x = self._destination(operands[0]), self.value(operands[1], "u64")
        match modifiers:
            case ["to", "global" | "const" | "local", "u64"] | ["global" | "const" | "local", "u64"]:
                return f"set({to}, {x});"
            case ["shared", "u64"]:
                return f"set({to}, shared + {x});"
            case ["to", "shared", "u64"]:
                return f"set({to}, {x} - shared);"
        raise KeyError("cvta")

    def _ld(self, modifiers: list[str], operands: list[str]) -> str:
        kind, space = self._access(modifiers)
        parts = _elements(operands[0])
        if space == "param":
            source = f"(const {kind}*)({self._parameter(operands[1])})"
        else:
            source = f"read<{kind}, {len(parts)}>({self._address(operands[1], space)})"
        sets = [f"set({self._destination(part)}, from[{i}]);" for i, part in enumerate(parts) if part != "_"]
        return f"{{ const {kind}* from = {source}; {' '.join(sets)} }}"

    def _st(self, modifiers: list[str], operands: list[str]) -> str:
        kind, space = self._access(modifiers)
        parts = _elements(operands[1])
        sets = [f"to[{i}] = {self.value(part, kind)};" for i, part in enumerate(parts)]
        return f"{{ {kind}* to = write<{kind}, {len(parts)}>({self._address(operands[0], space)}); {' '.join(sets)} }}"

    def _atom(self, modifiers: list[str], operands: list[str]) -> str:
        *_, operation, suffix = [one for one in modifiers if one not in _HINTS]
        kind, space = TYPES[suffix], "shared" if "shared" in modifiers else ""
        address, size = self._address(operands[1], space), SIZES[kind]
        values = [self.value(operand, f"u{8 * size}") for operand in operands[2:]]
        if operation == "cas":
            old = f"emulator_compare_and_swap({address}, {size}, {values[0]}, {values[1]})"
        else:
            old = f"emulator_atomic({_combination(operation, suffix)}, {address}, {size}, {values[0]})"
        return f"set({self._destination(operands[0])}, {old});" if operands[0] != "_" else f"{old};"

    def _red(self, modifiers: list[str], operands: list[str]) -> str:
        return self._atom(modifiers, ["_", *operands])

    def _shfl(self, modifiers: list[str], operands: list[str]) -> str:
        sync, mode, kind = modifiers
        if (sync, kind) != ("sync", "b32"):
            raise KeyError("shfl")
        to, _, found = operands[0].partition("|")
        value, distance, clamp, mask = (self.value(operand, "u32") for operand in operands[1:])
        call = f"emulator_shuffle({_SHUFFLES[mode]}, {mask}, {value}, {distance}, {clamp}, &in_range)"
        also = f" set({self._destination(found)}, in_range);" if found and found != "_" else ""
        return f"{{ bool in_range; set({self._destination(to)}, (u32){call});{also} }}"

    def _vote(self, modifiers: list[str], operands: list[str]) -> str:
        sync, mode, _ = modifiers
        if sync != "sync":
            raise KeyError("vote")
        ballot = f"emulator_ballot({self.value(operands[2], 'u32')}, {self.value(operands[1], 'bool')})"
        return f"set({self._destination(operands[0])}, {_VOTES[mode].format(ballot)});"

    def _redux(self, modifiers: list[str], operands: list[str]) -> str:
        _, operation, kind = modifiers
        value, mask = (self.value(operand, "u32") for operand in operands[1:])
        return (
            f"set({self._destination(operands[0])}, emulator_reduce({_combination(operation, kind)}, {mask}, {value}));"
        )

    def _match(self, modifiers: list[str], operands: list[str]) -> str:
        if modifiers[:2] != ["any", "sync"]:
            raise KeyError("match")
        value, mask = self.value(operands[1], TYPES[modifiers[2]]), self.value(operands[2], "u32")
        return f"set({self._destination(operands[0])}, emulator_match({mask}, {value}));"

    def _bar(self, modifiers: list[str], operands: list[str]) -> str:
        if modifiers == ["warp", "sync"]:
            return f"emulator_sync_warp({self.value(operands[0], 'u32')});"
        if modifiers == ["sync"] and operands == ["0"]:
            return "emulator_sync_block();"
        raise KeyError("bar")

    def _barrier(self, modifiers: list[str], operands: list[str]) -> str:
        return self._bar([one for one in modifiers if one not in ("cta", "aligned")], operands)

    def _membar(self, modifiers: list[str], operands: list[str]) -> str:
        return ";"

    _fence = _membar

    def _bra(self, modifiers: list[str], operands: list[str]) -> str:
        return f"goto {label(operands[0])};"

    def _brx(self, modifiers: list[str], operands: list[str]) -> str:
        cases = " ".join(f"case {i}: goto {label(to)};" for i, to in enumerate(self.branches[operands[1]]))
        return f"switch ({self.value(operands[0], 'u32')}) {{ {cases} }}"

    def _ret(self, modifiers: list[str], operands: list[str]) -> str:
        return "return;"

    _exit = _ret

    # ------------------------------------------------------------------------------------------ operands

    def _access(self, modifiers: list[str]) -> tuple[str, str]:
        """The element type of a load or store, and its state space where that matters."""
        kind = TYPES[modifiers[-1]].replace("float", "u32").replace("double", "u64")
        rest = [one for one in modifiers[:-1] if one not in _HINTS and not re.fullmatch(r"v[248]|L[12]::\w+", one)]
        if rest not in ([], ["shared"], ["param"], ["local"]):
            raise KeyError("access")
        return kind, rest[0] if rest else ""

    def _address(self, operand: str, space: str) -> str:
        base, offset = parsed(r"\[([%\w$]+)(?:\+(-?\d+))?\]", operand)
        start = self.value(base, self.registers.get(base, "u64"))
        return f"{'shared + ' if space == 'shared' else ''}{start} + {offset or 0}"

    def _parameter(self, operand: str) -> str:
        name, offset = parsed(r"\[(\w+)(?:\+(\d+))?\]", operand)
        return f"(u64)parameters[{list(self.parameters).index(name)}] + {offset or 0}"

    def _destination(self, operand: str) -> str:
        self.registers[operand]
        return register(operand)

    def _raw(self, operand: str) -> str:
        """An operand in its own type."""
        if operand in _SPECIAL:
            return _SPECIAL[operand]
        if operand in self.registers:
            return register(operand)
        if operand[:1] == "!":
            return f"!{self._raw(operand[1:])}"
        if operand in self.symbols:
            return self.symbols[operand]
        if re.fullmatch(r"0[fF][0-9A-Fa-f]{8}", operand):
            return f"0x{operand[2:]}u"
        if re.fullmatch(r"0[dD][0-9A-Fa-f]{16}", operand):
            return f"0x{operand[2:]}ull"
        if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", operand):
            return f"{operand.rstrip('U')}{'' if operand.startswith('-') else 'u'}ll"
        raise KeyError(operand)

    def value(self, operand: str, kind: str) -> str:
        return f"as<{kind}>({self._raw(operand)})"


def _combination(operation: str, suffix: str) -> str:
    if suffix == "f32":
        return {"add": "ADD_FLOAT"}[operation]
    signed = suffix.startswith("s") and operation in ("min", "max")
    return ("SIGNED_" if signed else "") + _COMBINATIONS[operation]


def parsed(pattern: str, text: str) -> tuple[str, ...]:
    found = re.fullmatch(pattern, text)
    if not found:
        raise KeyError(text)
    return found.groups()


def _elements(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{}").split(",")]


def register(name: str) -> str:
    return name.replace("%", "reg_").replace("$", "_")


def label(name: str) -> str:
    return name.replace("$", "label")
