"""Runs the command line, as a process or in this one, on small caches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

LAYERS, HEADS, TOKENS, DIM = 3, 2, 150, 16
KVZIP = [sys.executable, "-m", "kvzip"]


def cache_file(path: Path, seed: int = 7, tokens: int = TOKENS) -> Path:
    """A cache of float16 with one tensor that is no KV, in a safetensors file."""
    rng = np.random.default_rng(seed)
    arrays = {
        f"layers.{layer}.{kind}": rng.standard_normal((HEADS, tokens, DIM)).astype(np.float16)
        for layer in range(LAYERS)
        for kind in ("key", "value")
    }
    arrays["input_ids"] = np.arange(tokens)
    safetensors.numpy.save_file(arrays, path, metadata={"model": "test"})
    return path


def process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """The real command, by default with nothing to read; it never shows a traceback."""
    options = {"stdin": subprocess.DEVNULL, "timeout": 60, **options}
    if "input" in options:
        del options["stdin"]
    done = subprocess.run([*KVZIP, *map(str, arguments)], capture_output=True, **options)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done


def kvzip(*arguments: object) -> int:
    """The exit code of the same command run in this process: faster, and as good but for pipes and signals."""
    from kvzip.cli import run

    return run([str(argument) for argument in arguments])
