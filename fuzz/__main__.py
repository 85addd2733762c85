"""``python -m fuzz``: run targets for a time, or replay what was found."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from fuzz.engine import BATCH, Target, fuzz
from fuzz.targets import all_targets


def main() -> int:
    """Exit code 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="all if none is named; see --list")
    parser.add_argument("--list", action="store_true", help="print the targets' names")
    parser.add_argument("--seconds", type=float, help="for each target; without it and --inputs there is no end")
    parser.add_argument("--inputs", type=int, help="for each target")
    parser.add_argument("--seed", type=int, default=time.time_ns() >> 20, help="names the run")
    parser.add_argument("--log", type=Path, help="append a line per target and round")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run one kept input in this process")
    options = parser.parse_args()
    known = all_targets()
    if options.list:
        print("\n".join(known))
        return 0
    chosen = [known[name] for name in options.targets or known]
    if options.replay:
        for target in chosen if options.targets else [known[options.replay.name.rpartition("-")[0]]]:
            target.run([options.replay.read_bytes()])
        return 0
    return 0 if run(chosen, options) else 1


def run(targets: list[Target], options: argparse.Namespace) -> bool:
    """Rounds over all targets, endless if there is no limit; False after the first that found something."""
    endless = options.seconds is None and options.inputs is None
    seed = options.seed
    while True:
        sound = True
        for target in targets:
            batches = -(-options.inputs // BATCH) if options.inputs else None
            outcome = fuzz(target, seed=seed, seconds=60 if endless else options.seconds, batches=batches)
            line = f"{target.name}: {outcome.count} inputs, {outcome.seconds:.0f} s, seed {seed}"
            line += f", FOUND {outcome.finding}" if outcome.finding else ""
            print(line, flush=True)
            if options.log:
                with options.log.open("a") as log:
                    log.write(f"{time.strftime('%Y-%m-%d %H:%M')} {line}\n")
            sound = sound and not outcome.finding
        if not (endless and sound):
            return sound
        seed += 1


if __name__ == "__main__":
    sys.exit(main())
