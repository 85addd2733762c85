"""The same bytes on both devices, and the same answer to damaged ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvzip.cache import Block
from kvzip.codecs.base import Batch, Codec, Encoded
from kvzip.devices.base import Device
from kvzip.errors import CorruptError
from tools.gpu_check.caches import Case, codec_specs, other_cases, random_cases, sample_cases
from tools.gpu_check.check import Check, until, words

HostSections = dict[str, np.ndarray]

TRIALS, QUICK_TRIALS = 400, 40


def equality(check: Check) -> None:
    """Encode and decode every cache with every codec on both devices; a row per codec."""
    cases = sample_cases() + random_cases() + other_cases()
    check.heads("codec", "#blocks", "#bytes", "encode", "decode")

    def row(spec: str, end: float) -> int:
        blocks = nbytes = 0
        encoding: list[str] = []
        decoding: list[str] = []
        for case in cases:
            try:
                expected = _compared(spec, case, check, encoding, decoding)
            except Exception as error:
                encoding.append(f"{case.name}: {words(error)}")
                check.survive(f" at {spec}, {case.name}")
                continue
            blocks += len(expected)
            nbytes += sum(section.nbytes for sections in expected for section in sections.values())
        near = spec.endswith("profile=random")
        print(f"| {spec} | {blocks} | {nbytes} | {_verdict(encoding, near)} | {_verdict(decoding, near)} |", flush=True)
        return len(encoding) + len(decoding)

    check.each(codec_specs(), row)


def _compared(spec: str, case: Case, check: Check, encoding: list[str], decoding: list[str]) -> list[HostSections]:
    """The sections that the CPU makes; what is different on the GPU is added to the lists."""
    cpu, gpu = check.cpu, check.gpu
    codec = case.bind(spec)
    if codec is None:
        return []
    batch = case.batch(codec, cpu)
    expected, found = codec.encode(batch, cpu), codec.encode(case.batch(codec, gpu), gpu)
    encoding += compare_encoded(codec, case, batch.blocks, expected, found, gpu)
    sections = [host_sections(encoded, cpu) for encoded in expected]
    decoded = [decode(codec, case, batch, sections, device) for device in (cpu, gpu)]
    decoding += compare_arrays(codec, case, batch.blocks, *decoded)
    return sections


def hostile(check: Check) -> None:
    """Damage sections at random: both devices must refuse or decode the same, and the GPU must go on working. A row per
    codec.
    """
    check.heads("codec", "#damaged", "#refused", "#decoded to the same", "differ")
    cases = sample_cases() + random_cases(1) + other_cases(1)
    trials = QUICK_TRIALS if check.quick else TRIALS

    def row(spec: str, end: float) -> int:
        rng = np.random.default_rng(1)
        sound = [one for case in cases if (one := _first_block(spec, case, check.cpu)) is not None]
        refused = same = 0
        faults: list[str] = []
        for trial in until(end, trials):
            case, codec, one, sections = sound[trial % len(sound)]
            damaged = damage(sections, rng)
            results = [attempt(codec, case, one, damaged, device) for device in (check.cpu, check.gpu)]
            if isinstance(results[0], str) or isinstance(results[1], str):
                refused += 1
                if results[0] != results[1]:
                    faults.append(f"{case.name}: cpu {_told(results[0])}, gpu {_told(results[1])}")
            # What a damaged scale makes of sums that have no fixed order is nobody's promise.
            elif codec.profile is None and (
                different := compare_arrays(codec, case, one.blocks, *([one_nan(a, case) for a in r] for r in results))
            ):
                faults += different
            else:
                same += 1
        print(f"| {spec} | {trial + 1} | {refused} | {same} | {_verdict(faults)} |", flush=True)
        return len(faults)

    check.each(codec_specs(), row)


def _first_block(spec: str, case: Case, cpu: Device) -> tuple[Case, Codec, Batch, HostSections] | None:
    """A case's codec, its first block alone, and the block's sections."""
    codec = case.bind(spec)
    if codec is None:
        return None
    batch = case.batch(codec, cpu)
    one = Batch(batch.blocks[:1], batch.arrays[: len(batch.blocks[0].planes)])
    return case, codec, one, host_sections(codec.encode(one, cpu)[0], cpu)


def compare_encoded(
    codec: Codec, case: Case, blocks: Sequence[Block], expected: list[Encoded], found: list[Encoded], gpu: Device
) -> list[str]:
    """Faults in words. With a profile a coefficient may fall to the other side of a boundary: sizes are compared."""
    faults = []
    for block, one, other in zip(blocks, expected, found, strict=True):
        where = f"{case.name}, {block.planes[0]} {block.start}:{block.stop}"
        if list(one.sections) != list(other.sections):
            faults.append(f"{where}: sections {list(one.sections)} and {list(other.sections)}")
            continue
        if codec.profile is not None:
            sizes = [sum(section.nbytes for section in each.sections.values()) for each in (one, other)]
            damage = [sum(error.squared_error for error in each.errors) for each in (one, other)]
            if abs(sizes[0] - sizes[1]) > 64 + sizes[0] / 200 or not np.isclose(*damage, rtol=0.01, equal_nan=True):
                faults.append(f"{where}: {sizes[0]} and {sizes[1]} bytes, squared errors {damage[0]} and {damage[1]}")
            continue
        theirs = host_sections(other, gpu)
        faults += [
            f"{where}: {tag} differs" for tag, data in one.sections.items() if not np.array_equal(data, theirs[tag])
        ]
        if [repr(error) for error in one.errors] != [repr(error) for error in other.errors]:
            faults.append(f"{where}: errors {one.errors} and {other.errors}")
    return faults


def compare_arrays(
    codec: Codec, case: Case, blocks: Sequence[Block], expected: Sequence[np.ndarray], found: Sequence[np.ndarray]
) -> list[str]:
    """Which planes differ, in words."""
    planes = [(block, plane) for block in blocks for plane in block.planes]
    faults = []
    for (block, plane), one, other in zip(planes, expected, found, strict=True):
        wrong = one != other if codec.profile is None else far(one.view(plane.dtype), other.view(plane.dtype))
        if wrong.any():
            what = "bytes" if codec.profile is None else "numbers"
            faults.append(
                f"{case.name}, {plane} {block.start}:{block.stop}: {wrong.sum()} of {wrong.size} {what} differ"
            )
    return faults


def far(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Where numbers ``[tokens, heads, head_dim]`` are not within 1 ulp or 2^-14 of their token's rms: the order of the
    sums behind them is the library's.
    """
    x, y = one.astype(np.float32), other.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        rms = np.sqrt(np.square(x).mean(axis=(1, 2), keepdims=True))
        near = np.abs(x - y) <= np.maximum(np.abs(np.spacing(one).astype(np.float32)), rms * 2.0**-14)
    return ~(near | (x == y) | (np.isnan(x) & np.isnan(y)))


def one_nan(array: np.ndarray, case: Case) -> np.ndarray:
    """The same bytes with every NaN alike: what a product with a damaged scale makes of NaN is a processor's own."""
    numbers = array.view(case.planes[0].dtype)
    if numbers.dtype.kind in "iu":
        return array
    with np.errstate(invalid="ignore"):
        return np.where(np.isnan(numbers), np.ones_like(numbers), numbers).view(np.uint8)


def decode(
    codec: Codec, case: Case, batch: Batch, sections: Sequence[HostSections], device: Device
) -> list[np.ndarray]:
    """The decoded arrays as bytes on the host."""
    target = case.blank(batch, device)
    tags = [list(parts) for parts in sections]
    flat = iter(device.to_device_all([data for parts in sections for data in padded(parts).values()]))
    codec.decode(target, [{tag: next(flat) for tag in block_tags} for block_tags in tags], device)
    return [np.ascontiguousarray(device.to_host(array)).view(np.uint8) for array in target.arrays]


def attempt(codec: Codec, case: Case, batch: Batch, sections: HostSections, device: Device) -> list[np.ndarray] | str:
    """The decoded arrays, or the code of the error. Its words name the first of several faults, and devices that do
    not go through a block in the same order do not meet the same one first.
    """
    try:
        return decode(codec, case, batch, [sections], device)
    except CorruptError as error:
        return error.code


def host_sections(encoded: Encoded, device: Device) -> HostSections:
    return dict(zip(encoded.sections, device.to_host_all(list(encoded.sections.values())), strict=True))


def padded(sections: HostSections) -> HostSections:
    """Copies with the bytes behind them that the cpu device is promised."""
    copies = {}
    for tag, data in sections.items():
        buffer = np.zeros(data.nbytes + 128, np.uint8)
        buffer[: data.nbytes] = data
        copies[tag] = buffer[: data.nbytes]
    return copies


def damage(sections: HostSections, rng: np.random.Generator) -> HostSections:
    """One section with some bytes changed, cut short, made longer, or missing."""
    damaged = dict(sections)
    tag = str(rng.choice(list(sections)))
    data = sections[tag].copy()
    way = rng.integers(8)
    if way == 0:
        del damaged[tag]
        return damaged
    if way == 1:
        data = data[: rng.integers(data.size + 1)]
    elif way == 2:
        data = np.concatenate([data, rng.integers(0, 256, int(rng.integers(1, 64)), np.uint8)])
    elif way == 3:
        data = rng.integers(0, 256, data.size, np.uint8)
    elif data.size:
        for _ in range(int(rng.integers(1, 9))):
            data[rng.integers(data.size)] ^= 1 << rng.integers(8)
    damaged[tag] = data
    return damaged


def _verdict(faults: list[str], near: bool = False) -> str:
    if not faults:
        return "near enough" if near else "equal"
    return f"**{len(faults)} differ**: " + "; ".join(faults[:3])


def _told(result: object) -> str:
    return repr(result) if isinstance(result, str) else "decodes"
