"""Where profiles are found."""

from __future__ import annotations

from pathlib import Path

from kvzip.profiles.profile import Profile, read


def find(profile: str) -> Profile:
    """The profile in the file ``profile``."""
    return read(Path(profile))
