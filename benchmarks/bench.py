"""shardledger's stages beside DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed: speed, memory, traffic, in one run.

    python benchmarks/bench.py            everything, an hour and a half on two cores
    python benchmarks/bench.py --quick    under five minutes

Writes tables, a picture and latest.json, after every case anew: cases measured before on the same machine and versions,
with as many rounds, stay in them. See benchmarks/README.md for what is measured how.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from side_by_side import kept, report
from side_by_side.cases import ALL, SETS, Case, Contender
from side_by_side.conductor import Protocol, conduct
from side_by_side.engines import missing

RESULTS = Path(__file__).resolve().parent / "results"
PART = RESULTS / "part"


def chosen(wanted: str) -> list[Contender]:
    """Contenders whose label is, or else contains, one of the comma-separated texts; all when there is none.

    Raises:
        ValueError: no label contains one of them.
    """
    labels = {c.label.lower(): c for c in ALL}
    found = set()
    for text in [text.strip().lower() for text in wanted.split(",") if text.strip()]:
        matching = {text} if text in labels else {label for label in labels if text in label}
        if not matching:
            raise ValueError(f"no engine is called {text!r}; there are: " + "; ".join(c.label for c in ALL))
        found |= matching
    return [c for label, c in labels.items() if not wanted or label in found]


def cases_named(wanted: str, cases: list[Case]) -> list[Case]:
    """Cases whose title contains the text (titles have commas), or else one of its comma-separated parts; all for none."""
    whole = [case for case in cases if wanted in case.title]
    texts = [text.strip() for text in wanted.split(",") if text.strip()]
    return whole or [case for case in cases if any(text in case.title for text in texts)]


def asked_for(arguments: list[str] | None) -> tuple[argparse.Namespace, list[Contender], list[Case], Protocol]:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_const", const="quick", dest="set", help="two models, under 5 minutes")
    parser.add_argument("--smoke", action="store_const", const="smoke", dest="set", help="a toy, for tests")
    parser.add_argument("--rounds", type=_count, default=None, help="turns of every engine; 5 unless given")
    parser.add_argument("--engines", default="", help="parts of names, separated by commas: DDP,FSDP2,stage 2")
    parser.add_argument("--cases", default="", help="a part of a title, or several separated by commas: 25m,bf16")
    parser.add_argument(
        "--starts", type=_count, default=None, help="starts of every engine that are timed; 3 unless given"
    )
    parser.add_argument("--out", type=Path, default=None, help="folder of the results; see below", metavar="FOLDER")
    parser.epilog = (
        "Results of the whole protocol go to benchmarks/results, those of a part of it to benchmarks/results/part."
    )
    asked = parser.parse_args(arguments)
    name = asked.set or "full"
    part = name != "full" or asked.engines or asked.rounds or asked.starts
    asked.out = asked.out or (PART if part else RESULTS)
    few = {} if name == "full" else {"starts": 1, "saves": 1}
    protocol = Protocol(rounds=asked.rounds or 5, **{**few, **({"starts": asked.starts} if asked.starts else {})})
    try:
        contenders = chosen(asked.engines)
    except ValueError as error:
        parser.error(str(error))
    cases = cases_named(asked.cases.strip().lower(), SETS[name])
    if not cases:
        parser.error(f"no case is called {asked.cases!r}; there are: " + "; ".join(case.title for case in SETS[name]))
    return asked, contenders, cases, protocol


def main(arguments: list[str] | None = None) -> int:
    """Measure, write, print. 1 when engines did not train alike, or one that was asked for failed."""
    asked, contenders, cases, protocol = asked_for(arguments)
    absent = {why for c in contenders if (why := missing(c))}
    for why in absent:
        print(f"left out: {why}", flush=True)
    contenders = [c for c in contenders if not missing(c)]
    terms = f"{report.machine()}, {protocol.rounds} rounds"
    before = kept.set_aside(asked.out, terms)
    if before:
        print(
            f"results on other terms ({before}) are replaced; their measurements: {asked.out / kept.BEFORE}", flush=True
        )
    begin, wrong = time.monotonic(), False
    for case in cases:

        def say(text: str, title: str = case.title) -> None:
            print(f"{time.monotonic() - begin:6.0f} s  {title}: {text}", flush=True)

        rows = conduct(case, contenders, protocol, say)
        wrong = wrong or bool(report.disagreements(case, rows)) or any(row.failed for row in rows)
        found = kept.add(asked.out, terms, case, rows)
        written = report.write(asked.out, found, protocol, sorted(absent))
        print("\n".join(report.table(case, rows)), flush=True)
    print("written: " + ", ".join(str(path) for path in written))
    return int(wrong)


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return int(text)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that processes and files go
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted; the cases that were done are written", file=sys.stderr)
        sys.exit(130)
