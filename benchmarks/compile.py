"""What torch.compile gains: every unit of ours compiled with inductor, beside DDP compiled as a whole, in one run.

    python benchmarks/compile.py [--model 25m] [--stages 0,2,3] [--precision fp32] [--length 128] [--rounds 5]

Engines take turns, A B C A B C ...; ratios compare turns of one round: median [lowest .. highest]. ``first step`` is from the
start of the processes to the end of the first step, compilation included; the compiler's cache is empty at the start and
shared, so ours after the first find their graphs there.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator

from side_by_side.cases import COMPILED, DDP, Case, Contender
from side_by_side.conductor import Measured, Protocol, conduct
from side_by_side.numbers import ratio, spread
from side_by_side.report import disagreements, machine


def contenders(stages: list[int]) -> Iterator[Contender]:
    """Each engine as it is and compiled."""
    for one in (DDP, *(Contender("shardledger", stage) for stage in stages)):
        yield one
        yield Contender(one.engine, one.stage, COMPILED)


def table(case: Case, rows: list[Measured]) -> list[str]:
    """Speed of every engine beside itself not compiled and beside DDP compiled."""
    by = {row.contender: row for row in rows if row.seconds and not row.failed}
    lines = [
        "| engine | tokens/s | compiled / not | speed / DDP | speed / DDP compiled | CPU / step | first step |",
        "|---|" + "---:|" * 6,
    ]
    for row in rows:
        if row.contender not in by:
            lines.append(f"| {row.contender.label} | {(row.failed or 'no turn').strip().splitlines()[-1]} |" + " |" * 5)
            continue
        plain = Contender(row.contender.engine, row.contender.stage)
        cells = [row.contender.label, f"{case.tokens / spread(row.seconds).middle:.0f}"]
        for other in (plain, DDP, Contender(DDP.engine, DDP.stage, COMPILED)):
            told = other in by and other != row.contender
            cells.append(str(ratio(by[other].seconds, row.seconds)) if told else "")
        cells.append(f"{spread(row.process_cpu_s).middle * 1e3:.0f} ms")
        cells.append(f"{spread(row.starts).middle:.1f} s")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> int:
    """Measure and print. 1 when engines did not train alike."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="25m")
    parser.add_argument("--stages", default="0,2,3")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=2, help="rows of one rank's micro-batch")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of one turn")
    asked = parser.parse_args()
    case = Case(
        model=asked.model,
        world=asked.world,
        precision=asked.precision,
        steps=asked.steps,
        sequences=asked.sequences,
        length=asked.length,
    )
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begin:6.0f} s  {text}", file=sys.stderr, flush=True)

    rows: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="shardledger-compile-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        protocol = Protocol(rounds=asked.rounds, starts=1, saves=0, memory=False)
        rows = conduct(case, list(contenders([int(stage) for stage in asked.stages.split(",")])), protocol, say)
    print(f"# {case.title}, {case.sequences} x {case.length} tokens a rank; {machine()}; {asked.rounds} rounds\n")
    print("\n".join(table(case, rows)))
    problems = disagreements(case, rows)
    print("\n" + ("\n".join(problems) or "Losses of all engines agree at every step."))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
