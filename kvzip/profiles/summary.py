"""A profile in words and JSON values, for people and programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvzip.profiles.profile import Profile
from kvzip.profiles.rope import Rope
from kvzip.profiles.scales import power


def summary(profile: Profile) -> dict[str, Any]:
    """Everything but the numbers of the bases."""
    return {
        "hash": profile.hash,
        "model": profile.model,
        "geometry": asdict(profile.geometry),
        "rope": profile.ropes.to_json(),
        "step": finest_step(profile),
        "groups": [
            {
                "layers": list(group.layers),
                "width": len(group.mean),
                "rank": group.rank,
                "dtype": group.vectors.dtype.name,
                "bytes": group.mean.nbytes + group.vectors.nbytes + group.scales.nbytes + group.deviations.nbytes,
            }
            for group in profile.groups
        ],
        "trained_on": asdict(profile.seen),
    }


def finest_step(profile: Profile) -> float:
    """The finest step that the ranks serve, 3 digits."""
    return float(f"{float(power(profile.step)):.3g}")


def data(profile: Profile) -> str:
    """What it has seen."""
    seen = profile.seen
    return f"{seen.tokens} tokens of {_caches(seen.caches)}"


def gain(profile: Profile) -> str:
    """What the profile saves on caches that it was not learned from."""
    seen, step = profile.seen, finest_step(profile)
    if not seen.held_out:
        return "its gain is not known: a second cache would be held out to tell"
    return f"{_caches(seen.held_out)} held out: {seen.bits_plain:.2f} -> {seen.bits:.2f} bits a number at step {step}"


def rotation(rope: Rope | None) -> str:
    """``theta 1e+06, half-split pairs``."""
    if rope is None:
        return "none"
    parts = [f"theta {rope.theta:g}", f"{'neighbouring' if rope.interleaved else 'half-split'} pairs"]
    if rope.rotary:
        parts.append(f"{rope.rotary} channels" + (f" from {rope.offset}" if rope.offset else ""))
    if rope.scaling:
        parts.append(f"{rope.scaling.kind} x {rope.scaling.factor:g}")
    if rope.start:
        parts.append(f"from position {rope.start}")
    return ", ".join(parts)


def _caches(count: int) -> str:
    return f"{count} cache{'' if count == 1 else 's'}"
