"""A pickle is data or it is refused: nothing that it says is ever run."""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvzip.errors import CorruptError, KvzipError, UnsupportedError
from kvzip.lmcache import blob, pickles, tensors
from kvzip.lmcache.pickle_writing import dump
from kvzip.lmcache.pickles import Call, Instance, Name, Reference
from tests.reference import golden

CASE = "cachegen-t7-fp16"


class Touch:
    """Would leave a file behind if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def call(module: str, name: str, *arguments: str) -> bytes:
    """The opcodes of a call with texts."""
    return b"c" + f"{module}\n{name}\n(".encode() + b"".join(map(text, arguments)) + b"tR"


def hostile(marker: Path) -> dict[str, bytes]:
    """Everything by which a pickle can run code or look beyond itself, and the error that refuses it."""
    touch = f"open({str(marker)!r}, 'w').close()"
    proto = b"\x80\x04"
    legacy = b"\x80\x02" + call("builtins", "exec", touch) + b"."
    rebuild = b"ctorch.storage\n_load_from_bytes\n(B" + struct.pack("<I", len(legacy)) + legacy + b"tR"
    inside = proto + b"ctorch._utils\n_rebuild_tensor_v2\n(" + rebuild + b"K\x00K\x01\x85K\x01\x85\x89Ntr0."
    return {
        "GLOBAL and REDUCE": proto + call("builtins", "exec", touch) + b".",
        "STACK_GLOBAL": proto + text("os") + text("system") + b"\x93" + text("true") + b"\x85R.",
        "a listed module, another name": proto + call("torch._utils", "_import_dotted_name", "os.system") + b".",
        "a listed name, another module": proto + call("os", "OrderedDict") + b".",
        "a dotted name": proto + text("collections") + text("OrderedDict.__init__") + b"\x93.",
        "INST": b"(" + text(touch) + b"ibuiltins\nexec\n.",
        "OBJ": b"(cbuiltins\nexec\n" + text(touch) + b"o.",
        "NEWOBJ": proto + b"cbuiltins\nexec\n" + text(touch) + b"\x85\x81.",
        "NEWOBJ_EX": proto + b"ccollections\nOrderedDict\n)}\x92.",
        "NEWOBJ with arguments": proto + b"ccollections\nOrderedDict\n" + text(touch) + b"\x85\x81.",
        "EXT1": proto + b"\x82\x01.",
        "EXT2": proto + b"\x83\x01\x00.",
        "EXT4": proto + b"\x84\x01\x00\x00\x00.",
        "PERSID": b"Psomewhere\n.",
        "NEXT_BUFFER": b"\x80\x05\x97.",
        "BYTEARRAY8": b"\x80\x05\x96" + struct.pack("<Q", 0) + b".",
        "BUILD of a name": proto + b"ccollections\nOrderedDict\n}b.",
        "REDUCE of a text": proto + text("os.system") + text("true") + b"\x85R.",
        "DUP": proto + b"]2\x86.",
        "POP": proto + b"NN0.",
        "POP_MARK": proto + b"N(N1.",
        "STRING": b"S'text'\n.",
        "INT": b"I1\n.",
        "FLOAT": b"F1.0\n.",
        "FROZENSET": proto + b"(\x91.",
        "inside a storage": inside,
        "__reduce__": pickle.dumps(Touch(marker)),
    }


@pytest.mark.parametrize("attack", hostile(Path("marker")))
def test_hostile_pickles_are_refused_by_name(attack: str, tmp_path: Path) -> None:
    """Nothing is run, imported or looked up, and the error says what was asked for."""
    marker = tmp_path / "marker"
    before = set(sys.modules)
    with pytest.raises(KvzipError) as error:
        blob.read_blob(hostile(marker)[attack], "evil.bin")
    assert not marker.exists()
    assert set(sys.modules) <= before
    assert error.value.code in ("pickle-global", "pickle-opcode", "pickle-damaged", "lmcache-blob")
    assert "evil.bin" in str(error.value)


@pytest.mark.parametrize(
    ("attack", "named"),
    [("STACK_GLOBAL", "os.system"), ("GLOBAL and REDUCE", "builtins.exec"), ("EXT1", "EXT1"), ("INST", "INST")],
)
def test_what_is_refused_is_named(attack: str, named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        blob.read_blob(hostile(Path("marker"))[attack])


def test_calls_in_real_files_are_refused_elsewhere_too() -> None:
    """A sound file with one name changed, in the pickle or in a storage inside it."""
    sound = golden.load_case(CASE).encoded
    for old, new in ((b"_rebuild_tensor_v2", b"_rebuild_tensor_v3"), (b"IntStorage", b"AntStorage")):
        with pytest.raises(UnsupportedError) as error:
            blob.read_blob(sound.replace(old, new))
        assert error.value.code == "pickle-global" and new.decode() in str(error.value)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_give_errors_or_whole_blobs(seed: int) -> None:
    """Bytes changed, cut or put in anywhere: an error with a code, never another exception."""
    sound = golden.load_case(CASE).encoded
    rng = np.random.default_rng(seed)
    for _ in range(150):
        data = bytearray(sound)
        at = int(rng.integers(len(data)))
        match rng.integers(3):
            case 0:
                data[at] = rng.integers(256)
            case 1:
                del data[at : at + int(rng.integers(1, 200))]
            case _:
                data[at:at] = rng.integers(0, 256, rng.integers(1, 9), np.uint8).tobytes()
        try:
            found = blob.read_blob(bytes(data))
        except KvzipError as error:
            assert error.code
        else:
            assert found.tables.shape[1] == found.heads * found.head_dim


def test_every_cut_is_an_error() -> None:
    sound = golden.load_case(CASE).encoded
    for size in [*range(400), *range(400, len(sound), 371)]:
        with pytest.raises(KvzipError):
            blob.read_blob(sound[:size])


def test_what_follows_the_pickle_is_an_error() -> None:
    with pytest.raises(CorruptError, match="3 bytes follow"):
        blob.read_blob(golden.load_case(CASE).encoded + b"...")


def test_small_files_cannot_announce_large_tensors() -> None:
    """A stride of 0 or a storage that is not there would blow up: neither may exceed what the file holds."""
    array = tensors.TensorWriter(iter("0"))(np.zeros(4, np.uint8))
    storage, _, _, _, *rest = array.arguments
    for offset, size, stride in [
        (0, (1 << 40,), (0,)),
        (0, (2, 2), (4, 1)),
        (3, (2,), (1,)),
        (0, (2,), (-1,)),
        (-1, (2,), (1,)),
        (0, (1 << 62, 4), (0, 1)),
        (0, (4,), (1, 1)),
        (0, (True,), (1,)),
    ]:
        with pytest.raises(CorruptError):
            tensors.read_tensor(Call(tensors.REBUILD, (storage, offset, size, stride, *rest)), "t")
    (data,) = storage.arguments
    for wrong in (data[:-1], data + b"\0", data[:-12] + struct.pack("<q", 1 << 50) + data[-4:]):
        with pytest.raises(CorruptError):
            tensors.read_tensor(Call(tensors.REBUILD, (Call(tensors.LOAD, (wrong,)), 0, (4,), (1,), *rest)), "t")


def test_nested_lists_and_self_references_do_no_harm() -> None:
    """Depth costs no stack, and a list that holds itself is never walked."""
    deep = b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b"."
    assert isinstance(pickles.load(io.BytesIO(deep), (), "deep"), list)
    itself = b"\x80\x04]\x94h\x00a."
    with pytest.raises(CorruptError):
        blob.read_blob(itself)


class Plain:
    pass


VALUES: list[Any] = [
    None, True, 0, 255, 256, 65535, 65536, -1, 1 << 31, -(1 << 40), 1 << 200, "", "text", "\u00e9" * 200,
    (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], [1], [1, 2], {}, {"a": 1}, {"a": 1, "b": [2, ("c",)]},
    list(range(1000)),
    ["t" * 5_000] * 3, [str(i) * 20 for i in range(1000)], [str(i) * 20 for i in range(2500)],
]  # fmt: skip
BYTES: list[Any] = [b"", b"x" * 300, [b"y" * 70_000, b"z" * 100, b"w" * 66_000], [b"u" * 65_530, 1, 2, b"v" * 65_536]]


@pytest.mark.parametrize("value", [*VALUES, *BYTES], ids=lambda value: repr(value)[:20])
def test_written_pickles_are_those_of_python(value: Any) -> None:
    """Opcode by opcode: frames, memo, short and long forms. Read back, they give the value."""
    for protocol in (2, 4) if value in VALUES else (4,):
        assert dump(value, protocol) == pickle.dumps(value, protocol)
        assert pickles.load(io.BytesIO(dump(value, protocol)), (), "value") == value


def test_what_has_no_form_in_these_pickles_is_refused() -> None:
    for value, protocol in ((1.5, 4), (b"x", 2), ({1}, 4)):
        with pytest.raises(TypeError):
            dump(value, protocol)


def test_records_survive() -> None:
    kind, function = Name("a", "b"), Name("c", "d")
    value = Instance(kind, {"x": Call(function, (Reference(("k", 1)), Call(function, ())))})
    for protocol in (2, 4):
        data = dump(value, protocol)
        back = pickles.load(io.BytesIO(data), {("a", "b"), ("c", "d")}, "value")
        assert dump(back, protocol) == data
    assert "BINPERSID" in {opcode.name for opcode, _, _ in pickletools.genops(data)}
