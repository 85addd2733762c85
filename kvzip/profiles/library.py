"""Where profiles are found: by path, or by the hash under which a ``.kvz`` names one.

Every decoder imports this, few need a profile: what reads one is imported where it is used.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvzip.errors import CorruptError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from kvzip.profiles.profile import Profile

ENVIRONMENT = "KVZIP_PROFILES"
"""Names more places: files and folders, separated like those of ``PATH``."""

SUFFIX = ".kvp"
HASH = re.compile(r"[0-9a-f]{8,64}")
WHOLE = 64


@dataclass(frozen=True)
class Embedded:
    """A profile inside another file: the hash that this tells, and what brings the bytes."""

    name: str
    hash: str
    read: Callable[[], bytes]


Place = Embedded | str | os.PathLike[str]
"""A file that holds a profile, a folder of such files, or a profile inside another file."""

_offered: ContextVar[tuple[Place, ...]] = ContextVar("offered profiles", default=())


@contextmanager
def offering(places: Iterable[Place]) -> Iterator[None]:
    """Hashes are looked for in these places before all others: by this thread, within the block, and in ``.kvz`` files
    that it opens there.
    """
    token = _offered.set((*places, *_offered.get()))
    try:
        yield
    finally:
        _offered.reset(token)


def offered() -> tuple[Place, ...]:
    """The places that hold in this thread."""
    return _offered.get()


def search_path() -> list[Place]:
    """Where hashes are looked for: what is offered, ``$KVZIP_PROFILES``, the user's data folder."""
    named = os.environ.get(ENVIRONMENT, "").split(os.pathsep)
    return [*offered(), *(Path(name).expanduser() for name in named if name), data_folder()]


def data_folder() -> Path:
    """Where this platform keeps a user's profiles, such as ``~/.local/share/kvzip/profiles``."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "kvzip" / "profiles"


def find(profile: str | os.PathLike[str]) -> Profile:
    """A profile by the path of its file, or by 8 to 64 digits of its hash (write ``./deadbeef`` for such a file).

    Raises:
        UsageError: no such file, or several profiles whose hashes start like that.
        UnsupportedError: no profile of this hash is here, or a later kvzip made it.
        CorruptError: the file is no profile, or is damaged.
    """
    text = os.fspath(profile)
    return by_hash(text.lower()) if HASH.fullmatch(text.lower()) else load(text)


def load(path: str | os.PathLike[str]) -> Profile:
    """The profile in a file; read once as long as the file does not change. Raises as :func:`find`."""
    try:
        if not Path(path).is_file():
            raise UsageError(f"{path}: no such profile; 'kvzip train' makes one", code="profile-missing")
        found = Path(path).stat()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the profile {path}: {error}", code="profile-missing") from error
    return _read(os.path.abspath(path), found.st_mtime_ns, found.st_size)  # noqa: PTH100  (links stay links)


def by_hash(prefix: str) -> Profile:
    """The profile whose hash starts with these 8 to 64 hexadecimal digits. Raises as :func:`find`."""
    if not HASH.fullmatch(prefix):
        raise UsageError(f"{prefix!r} is no hash of a profile: 8 to 64 hexadecimal digits", code="profile-hash")
    matches: dict[str, Place] = {}
    path = search_path()
    for digest, place in _hashes(path):
        if digest.startswith(prefix):
            matches.setdefault(digest, place)
            if len(prefix) == WHOLE:
                break
    if len(matches) > 1:
        raise UsageError(
            f"several profiles have a hash that starts with {prefix}: {', '.join(sorted(matches))}; give more digits",
            code="profile-hash",
        )
    if not matches:
        raise UnsupportedError(
            f"the profile {short(prefix)} is not here: looked for it in {_told(path)}. Name its file with --profile, "
            f"or put it into one of these folders",
            code="profile-missing",
        )
    ((digest, place),) = matches.items()
    from kvzip.profiles.profile import from_bytes

    found = from_bytes(place.read(), place.name) if isinstance(place, Embedded) else load(place)
    if found.hash != digest:
        raise CorruptError(
            f"the profile {_name(place)} is {short(found.hash)}, not {short(digest)} as it was named",
            code="profile-damaged",
        )
    return found


def is_profile(path: str | os.PathLike[str]) -> bool:
    """Whether a file says that it is a profile."""
    return Path(path).is_file() and _claimed(Path(path)) is not None


def short(digest: str) -> str:
    """A hash as people compare it."""
    return digest[:16]


@lru_cache(maxsize=8)
def _read(path: str, modified: int, size: int) -> Profile:
    from kvzip.profiles.profile import read

    return read(Path(path))


def _hashes(places: Sequence[Place]) -> Iterator[tuple[str, Place]]:
    """Every profile of the places with the hash that it claims; what cannot be read is passed over."""
    for place in places:
        if isinstance(place, Embedded):
            yield place.hash, place
            continue
        try:
            folder = Path(place)
            files = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else [folder]
        except (OSError, ValueError):
            continue
        for file in files:
            if file.is_file() and (digest := _claimed(file)):
                yield digest, file


def _claimed(path: Path) -> str | None:
    """The hash that a profile's header tells; None if it is no profile."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            digest = json.loads((file.metadata() or {})["kvzip"])["hash"]
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        return None
    return digest if isinstance(digest, str) else None


def _told(places: Sequence[Place]) -> str:
    return ", ".join(map(_name, places))


def _name(place: Place) -> str:
    return place.name if isinstance(place, Embedded) else str(place)
