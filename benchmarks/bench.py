"""shardledger's stages beside DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed: speed, memory, traffic, in one run.

    python benchmarks/bench.py            everything, about an hour on two cores
    python benchmarks/bench.py --quick    under five minutes

Writes a table, a picture and latest.json to benchmarks/results/. See benchmarks/README.md for what is measured how.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from side_by_side import report
from side_by_side.cases import ALL, SETS, Case, Contender
from side_by_side.conductor import Measured, Protocol, conduct
from side_by_side.engines import missing

HERE = Path(__file__).resolve().parent


def chosen(wanted: str) -> list[Contender]:
    """Contenders whose label is, or else contains, one of the comma-separated texts; all when there is none."""
    labels = {c.label.lower(): c for c in ALL}
    found = set()
    for text in [text.strip().lower() for text in wanted.split(",") if text.strip()]:
        found |= {text} if text in labels else {label for label in labels if text in label}
    return [c for label, c in labels.items() if not wanted or label in found]


def main(arguments: list[str] | None = None) -> int:
    """Measure, write, print. 1 when engines did not train alike."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_const", const="quick", dest="set", help="two models, under 5 minutes")
    parser.add_argument("--smoke", action="store_const", const="smoke", dest="set", help="a toy, for tests")
    parser.add_argument("--rounds", type=int, default=None, help="turns of every engine; 5 unless given")
    parser.add_argument("--engines", default="", help="parts of names, separated by commas: DDP,FSDP2,stage 2")
    parser.add_argument("--cases", default="", help="parts of titles, separated by commas: 25m,bf16")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    asked = parser.parse_args(arguments)
    name = asked.set or "full"
    protocol = Protocol(rounds=asked.rounds or 5, **({} if name == "full" else {"starts": 1, "saves": 1}))
    contenders = chosen(asked.engines)
    absent = {why for c in contenders if (why := missing(c))}
    for why in absent:
        print(f"left out: {why}", flush=True)
    contenders = [c for c in contenders if not missing(c)]
    texts = [text.strip().lower() for text in asked.cases.split(",") if text.strip()]
    cases = [case for case in SETS[name] if not texts or any(text in case.title for text in texts)]
    found: list[tuple[Case, list[Measured]]] = []
    begin = time.monotonic()
    for case in cases:

        def say(text: str, title: str = case.title) -> None:
            print(f"{time.monotonic() - begin:6.0f} s  {title}: {text}", flush=True)

        found.append((case, conduct(case, contenders, protocol, say)))
    written = report.write(asked.out, found, protocol, sorted(absent))
    print(report.markdown(found, protocol, sorted(absent)))
    print("written: " + ", ".join(str(path) for path in written))
    return 1 if any(report.disagreements(case, rows) for case, rows in found) else 0


if __name__ == "__main__":
    sys.exit(main())
