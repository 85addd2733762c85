"""Add a golden file: what this kvzip writes today, and what it reads back from it.

    python -m tools.add_golden_file NAME CODEC

compresses ``tests/golden/kvz/input.safetensors`` with CODEC, a codec with options as ``kvzip compress --codec`` takes
it, to ``NAME.kvz`` beside it, and records the digest of what it decompresses to in ``digests.json``. A file that exists
is never written again: it stands for the files that users have.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from pathlib import Path

import kvzip

FOLDER = Path(__file__).parents[1] / "tests" / "golden" / "kvz"


def main(name: str, codec: str) -> None:
    digests = json.loads((FOLDER / "digests.json").read_text())
    target = FOLDER / f"{name}.kvz"
    if name in digests or target.exists():
        sys.exit(f"{target} exists: golden files are never made anew; choose another name")
    kvzip.compress(FOLDER / "input.safetensors", target, codec=codec, device="cpu")
    restored = io.BytesIO()
    kvzip.decompress(target, restored, device="cpu")
    digests[name] = {"codec": codec, "restored_sha256": hashlib.sha256(restored.getvalue()).hexdigest()}
    (FOLDER / "digests.json").write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")
    print(f"{target}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
