"""Which model and which tokens a cache belongs to: recorded when it is made, checked before it is used.

A cache of another model, or of other tokens, decodes without complaint and makes nonsense of what follows. A header
holds the model's name as the user gives it, and count and SHA-256 of the token ids as little-endian 64-bit integers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tokenize
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvzip.errors import KvzipError, UsageError
from kvzip.tensorfile import TensorSource, open_tensors

TokenIds = Sequence[int] | np.ndarray
NAMES = ("token_ids", "input_ids", "tokens")
"""What a tensor of token ids is called, in the order in which they are looked for."""


def identify(model: str | None = None, token_ids: TokenIds | None = None) -> dict[str, Any]:
    """The header's ``identity`` of a cache of ``model`` and ``token_ids``; what is None is left out."""
    identity: dict[str, Any] = {} if model is None else {"model": model}
    if token_ids is not None:
        ids = _as_ids(token_ids, "token_ids")
        identity |= {"token_count": len(ids), "token_sha256": _digest(ids)}
    return identity


def fitted(token_ids: TokenIds, tokens: int, notice: Callable[[str], None]) -> np.ndarray:
    """The first of some token ids, int64, as many as a cache has ``tokens``; says so if there are more, or fewer."""
    ids = _as_ids(token_ids, "token_ids")
    if len(ids) > tokens:
        notice(f"{len(ids)} token ids for a cache of {tokens} tokens: the first {tokens} are recorded")
    elif len(ids) < tokens:
        notice(f"{len(ids)} token ids for a cache of {tokens} tokens: nothing is recorded of the others")
    return ids[:tokens]


def check(
    identity: Mapping[str, Any],
    expect_model: str | None = None,
    expect_tokens: TokenIds | None = None,
    name: str = "the cache",
) -> None:
    """Raise ``KvzipError`` unless a cache belongs to a model and to the first of some tokens.

    It may hold fewer tokens than are expected: a prefix of a KV cache is valid on its own.

    Args:
        identity: what the header records.
        name: what messages call the cache.
    """
    if expect_model is not None:
        found = identity.get("model")
        if found is None:
            raise KvzipError(f"{name} does not say which model it belongs to (compress --model)", code="no-identity")
        if found != expect_model:
            raise KvzipError(f"{name} belongs to the model {found!r}, not {expect_model!r}", code="wrong-model")
    if expect_tokens is not None:
        ids = _as_ids(expect_tokens, "expect_tokens")
        count, digest = identity.get("token_count"), identity.get("token_sha256")
        if type(count) is not int or digest is None:
            raise KvzipError(
                f"{name} does not say which tokens it belongs to (compress --token-ids)", code="no-identity"
            )
        if not 0 <= count <= len(ids):
            raise KvzipError(f"{name} is of {count} tokens, {len(ids)} are expected", code="wrong-tokens")
        if digest != _digest(ids[:count]):
            raise KvzipError(f"{name} belongs to other tokens than the first {count} expected", code="wrong-tokens")


def describe(identity: Mapping[str, Any]) -> str:
    """One line for people: the model, the tokens, and whatever else is recorded."""
    rest = {key: value for key, value in identity.items() if key not in ("model", "token_count", "token_sha256")}
    parts = [str(identity["model"])] if "model" in identity else []
    if "token_sha256" in identity:
        parts.append(f"{identity.get('token_count')} tokens (SHA-256 {str(identity['token_sha256'])[:16]}...)")
    return ", ".join([*parts, *([json.dumps(rest)] if rest else [])])


def read_token_ids(path: str | os.PathLike[str]) -> np.ndarray:
    """Token ids, int64, from a file: ``.npy``, ``.safetensors``, or a text of numbers (JSON is one, too).

    Raises ``UsageError`` for a file that holds no such numbers, ``CorruptError`` for damaged safetensors.
    """
    file = Path(path)
    if file.suffix == ".npy":
        try:
            return _as_ids(np.load(file, allow_pickle=False), str(path))
        except (ValueError, EOFError, SyntaxError, tokenize.TokenError, TypeError) as error:
            raise UsageError(f"{path}: no .npy file of numbers: {error}", code="token-ids") from error
    if file.suffix == ".safetensors":
        with open_tensors(file) as source:
            return token_ids_of(source)
    try:
        words = re.sub(r"[\[\],]", " ", file.read_text(encoding="utf-8")).split()
        return _as_ids(np.array(words, dtype="U").astype(np.int64), str(path))
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"{path}: expected token ids, numbers with blanks or commas between: {error}", code="token-ids"
        ) from error


def token_ids_of(source: TensorSource, name: str | None = None) -> np.ndarray:
    """Token ids, int64, from a tensor of a source: the one called ``name``, else the first that is called like one.

    Raises ``UsageError`` if there is none, if it holds no whole numbers, or if the source is a pipe.
    """
    tensors = {tensor.name: tensor for tensor in source.tensors}
    wanted = [name] if name else [known for known in NAMES if known in tensors]
    if not wanted or wanted[0] not in tensors:
        called = f"called {name!r}" if name else f"of token ids ({', '.join(NAMES)})"
        raise UsageError(f"{source.name} has no tensor {called}", code="token-ids")
    if not source.seekable:
        raise UsageError(f"{source.name} is a pipe: give the token ids in a file of their own", code="token-ids")
    tensor = tensors[wanted[0]]
    array = np.empty(tensor.nbytes, np.uint8)
    source.read_into(tensor.file, tensor.offset, array)
    return _as_ids(array.view(tensor.dtype).reshape(tensor.shape), f"{source.name}: tensor {tensor.name}")


def _as_ids(ids: TokenIds, name: str) -> np.ndarray:
    array = np.asarray(ids)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise UsageError(f"{name}: token ids are whole numbers, found {array.dtype}", code="token-ids")
    if array.ndim > 1 and array.size != array.shape[-1]:
        raise UsageError(f"{name}: token ids of one sequence are needed, found {list(array.shape)}", code="token-ids")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise UsageError(f"{name}: token ids are below 2^63", code="token-ids")
    return array.reshape(-1).astype(np.int64)


def _digest(ids: np.ndarray) -> str:
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()
