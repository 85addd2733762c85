"""What ``kvzip inspect`` shows of a profile."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from kvzip.cli import text
from kvzip.inspection import SCHEMA
from kvzip.profiles.library import load
from kvzip.profiles.profile import Profile
from kvzip.profiles.summary import data, finest_step, gain, rotation, summary


def show_profile(path: str, as_json: bool) -> None:
    """Print it for people, or as JSON. Raises what reading it raises."""
    profile, nbytes = load(path), Path(path).stat().st_size
    if as_json:
        print(json.dumps({"schema": SCHEMA, "file": path, "format": "kvp", "bytes": nbytes, **summary(profile)}))
        return
    print(text.plain(path))
    for label, value in _rows(profile, nbytes):
        print(text.plain(f"  {label:<16}{value}"))
    print()
    print(text.table(list(_groups(profile)), indent="  "))


def _rows(profile: Profile, nbytes: int) -> Iterable[tuple[str, str]]:
    geometry = profile.geometry
    dims = f"{geometry.key_dim}" if geometry.key_dim == geometry.value_dim else (
        f"{geometry.key_dim} (keys), {geometry.value_dim} (values)"
    )  # fmt: skip
    yield "profile of", profile.model or "a model without a name (train --model)"
    yield "hash", profile.hash
    yield "geometry", f"{geometry.layers} layers x {geometry.heads} heads x {dims}"
    for number, rope in enumerate(profile.ropes.kinds):
        of = [layer for layer, kind in enumerate(profile.ropes.layers) if kind == number]
        yield "" if number else "rotation", rotation(rope) + (f" (layers {text.runs(of)})" if of else "")
    yield "learned from", data(profile)
    yield "gain", gain(profile)
    yield "serves", f"steps from {finest_step(profile)} on; finer ones keep what its ranks leave out"
    yield "size", f"{text.size(nbytes)}, {profile.groups[0].vectors.dtype.name} bases"


def _groups(profile: Profile) -> Iterable[tuple[str, ...]]:
    yield "layers", "numbers a token", "coefficients", "bytes"
    for group in summary(profile)["groups"]:
        yield text.runs(group["layers"]), f"{group['width']}", f"{group['rank']}", f"{group['bytes']}"
