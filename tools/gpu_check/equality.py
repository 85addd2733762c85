"""The same bytes on both devices, and the same answer to damaged ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvzip.cache import Block
from kvzip.codecs.base import Batch, Codec, Encoded
from kvzip.devices.base import Device
from kvzip.errors import CorruptError
from tools.gpu_check.caches import Case, codec_specs, random_cases, sample_cases

HostSections = dict[str, np.ndarray]


def equality(cpu: Device, gpu: Device) -> int:
    """Encode and decode every cache with every codec on both devices; prints a table, returns how many differ."""
    print("| codec | blocks | bytes | encode | decode |\n|---|--:|--:|---|---|")
    failures = 0
    cases = random_cases() + sample_cases()
    for spec in codec_specs():
        blocks = nbytes = 0
        encode_faults: list[str] = []
        decode_faults: list[str] = []
        for case in cases:
            codec = case.bind(spec)
            batch = case.batch(codec, cpu)
            expected, found = codec.encode(batch, cpu), codec.encode(case.batch(codec, gpu), gpu)
            blocks += len(expected)
            nbytes += sum(section.nbytes for encoded in expected for section in encoded.sections.values())
            encode_faults += compare_encoded(case, batch.blocks, expected, found, gpu)
            sections = [host_sections(encoded, cpu) for encoded in expected]
            decode_faults += compare_arrays(
                case, batch.blocks, *(decode(codec, case, batch, sections, device) for device in (cpu, gpu))
            )
        failures += len(encode_faults) + len(decode_faults)
        print(f"| {spec} | {blocks} | {nbytes} | {_verdict(encode_faults)} | {_verdict(decode_faults)} |", flush=True)
    return failures


def hostile(cpu: Device, gpu: Device, trials: int) -> int:
    """Damage sections at random: both devices must say the same, and the GPU must go on working. Returns failures."""
    print("| codec | damaged | refused | decoded to the same | differ |\n|---|--:|--:|--:|---|")
    failures = 0
    for spec in codec_specs():
        rng = np.random.default_rng(1)
        refused = same = 0
        faults: list[str] = []
        for case in random_cases(1)[:7] + sample_cases()[:1]:
            codec = case.bind(spec)
            batch = case.batch(codec, cpu)
            one = Batch(batch.blocks[:1], batch.arrays[: len(batch.blocks[0].planes)])
            sections = host_sections(codec.encode(one, cpu)[0], cpu)
            for _ in range(max(1, trials // 8)):
                damaged = damage(sections, rng)
                results = [attempt(codec, case, one, damaged, device) for device in (cpu, gpu)]
                if isinstance(results[0], str) or isinstance(results[1], str):
                    refused += 1
                    if results[0] != results[1]:
                        faults.append(f"{case.name}: cpu {_words(results[0])}, gpu {_words(results[1])}")
                elif different := compare_arrays(case, one.blocks, *([one_nan(a, case) for a in r] for r in results)):
                    faults += different
                else:
                    same += 1
        failures += len(faults)
        print(f"| {spec} | {trials} | {refused} | {same} | {_verdict(faults)} |", flush=True)
    return failures


def compare_encoded(
    case: Case, blocks: Sequence[Block], expected: list[Encoded], found: list[Encoded], gpu: Device
) -> list[str]:
    faults = []
    for block, one, other in zip(blocks, expected, found, strict=True):
        where = f"{case.name}, {block.planes[0]} {block.start}:{block.stop}"
        if list(one.sections) != list(other.sections):
            faults.append(f"{where}: sections {list(one.sections)} and {list(other.sections)}")
            continue
        theirs = host_sections(other, gpu)
        faults += [
            f"{where}: {tag} differs" for tag, data in one.sections.items() if not np.array_equal(data, theirs[tag])
        ]
        if [repr(error) for error in one.errors] != [repr(error) for error in other.errors]:
            faults.append(f"{where}: errors {one.errors} and {other.errors}")
    return faults


def compare_arrays(
    case: Case, blocks: Sequence[Block], expected: Sequence[np.ndarray], found: Sequence[np.ndarray]
) -> list[str]:
    names = [f"{case.name}, {plane} {block.start}:{block.stop}" for block in blocks for plane in block.planes]
    return [
        f"{name}: {int((one != other).sum())} of {one.size} bytes differ"
        for name, one, other in zip(names, expected, found, strict=True)
        if not np.array_equal(one, other)
    ]


def one_nan(array: np.ndarray, case: Case) -> np.ndarray:
    """The same bytes with every NaN alike: what a product with a damaged scale makes of NaN is a processor's own."""
    numbers = array.view(case.planes[0].dtype)
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
    try:
        return decode(codec, case, batch, [sections], device)
    except CorruptError as error:
        return f"{error.code}: {error}"


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


def _verdict(faults: list[str]) -> str:
    if not faults:
        return "equal"
    return f"**{len(faults)} differ**: " + "; ".join(faults[:3])


def _words(result: object) -> str:
    return repr(result) if isinstance(result, str) else "decodes"
