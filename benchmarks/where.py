"""Where one engine's step goes: Python functions by own time, operators by own time, and a Chrome trace of rank 0.

python benchmarks/where.py --engine "shardledger stage 2" --case "25m parameters, 2 ranks, fp32" --trace step.json
"""

from __future__ import annotations

import argparse
import os
import tempfile

from side_by_side.cases import ALL, FULL, SMOKE
from side_by_side.crew import Crew


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", default="shardledger stage 2", help="a label of the benchmark's table")
    parser.add_argument("--case", default="3.4m parameters, 2 ranks, fp32", help="a title of the benchmark's tables")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--trace", default=None, help="file for the Chrome trace")
    parser.add_argument("--brief", action="store_true", help="only the times of a step")
    asked = parser.parse_args()
    contender = next(c for c in ALL if c.label.lower() == asked.engine.lower())
    case = next(c for c in (*FULL, *SMOKE) if c.title == asked.case)
    crew = Crew(case, contender)
    try:
        crew.ask("first")
        turn = crew.ask("turn", 3, asked.steps)[0]
        times = {name: f"{turn[name] * 1e3:.1f} ms" for name in ("seconds", "thread_cpu_s", "process_cpu_s")}
        print(f"{contender.label}, {case.title}, one step: {times}")
        if asked.brief:
            return
        print(crew.ask("python", asked.steps)[0]["text"])
        with tempfile.TemporaryDirectory() as folder:
            file = asked.trace or os.path.join(folder, "trace.json")
            print(crew.ask("trace", asked.steps, os.path.abspath(file))[0]["text"])
    finally:
        crew.end()


if __name__ == "__main__":
    main()
