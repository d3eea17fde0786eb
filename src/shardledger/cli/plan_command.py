"""The options of ``shardledger plan``; see ``plan.py`` for what they mean together."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Optional

import typer

from shardledger.cli.exits import report_and_exit

# typing.Optional rather than "str | None": typer before 0.12.4 does not read the latter on Python 3.10.
Text = Optional[str]  # noqa: UP045
Whole = Optional[int]  # noqa: UP045

ParamsOption = Annotated[
    Text, typer.Option("--params", metavar="COUNT", help="Parameters, as 7.5e9 or 7.5B: states only, at once.")
]
ModelOption = Annotated[
    Text, typer.Option("--model", help="gpt:SIZE, package.module:function or a Hugging Face config.json.")
]
WorldOption = Annotated[int, typer.Option("--world", min=1, help="Ranks.")]
PrecisionOption = Annotated[
    Text, typer.Option("--precision", help="bf16, fp16 or fp32. Default: the config's, or bf16 without one.")
]
OptimizerOption = Annotated[
    Text, typer.Option("--optimizer", help="adamw, sgd, sgd-momentum, ... Default: the config's, or adamw.")
]
MasterOption = Annotated[bool, typer.Option("--no-master", help="With --params: no fp32 masters in the account.")]
FrozenOption = Annotated[float, typer.Option("--frozen", metavar="SHARE", help="With --params: frozen share, as 0.99.")]
DeviceMemoryOption = Annotated[
    Text, typer.Option("--device-memory", metavar="SIZE", help="Of one device, as 80GiB: what must fit.")
]
HostMemoryOption = Annotated[Text, typer.Option("--host-memory", metavar="SIZE", help="Of one machine, for offload.")]
PerMachineOption = Annotated[
    Whole, typer.Option("--per-machine", min=1, help="Ranks in one machine. Default: 8, or all.")
]
FrameworkOption = Annotated[
    Text,
    typer.Option(
        "--framework",
        metavar="SIZE",
        help="On the device before the model, as 0.6GiB; 0: nothing. Default: see README.",
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="cuda or cpu: how ranks will talk.")]
MicroBatchOption = Annotated[Whole, typer.Option("--micro-batch", min=1, help="Samples per rank and forward pass.")]
SeqLenOption = Annotated[Whole, typer.Option("--seq-len", min=1, help="Tokens per sample.")]
AccumulationOption = Annotated[Whole, typer.Option("--accumulation", min=1, help="Micro-batches per optimizer step.")]
ConfigOption = Annotated[Text, typer.Option("--config", metavar="FILE", help="DeepSpeed-style JSON to plan with.")]
TrainableOption = Annotated[
    Text, typer.Option("--trainable", metavar="lora:r=16", help="Train adapters instead of the model.")
]
SamplesOption = Annotated[
    Whole, typer.Option("--task-samples", min=1, help="Samples of your task: few make LoRA come first.")
]
BandwidthOption = Annotated[Text, typer.Option("--bandwidth", metavar="RATE", help="Sent by one rank, as 50GB/s.")]
FlopsOption = Annotated[
    Text, typer.Option("--flops", metavar="RATE", help="Of one rank's matrix products, as 400TFLOP/s.")
]
LinkOption = Annotated[
    Text, typer.Option("--link", metavar="RATE", help="Between device and host memory, as 25GB/s: prices offload.")
]
DiskOption = Annotated[
    Text, typer.Option("--disk", metavar="RATE", help="Of the disk, as 3GB/s: prices offload to nvme.")
]
NvmePathOption = Annotated[
    Text, typer.Option("--nvme-path", metavar="DIR", help="Folder whose disk --measure tries. Default: here.")
]
MeasureOption = Annotated[
    bool, typer.Option("--measure", help="Measure these rates on this machine, in a few seconds.")
]
VerifyOption = Annotated[
    bool, typer.Option("--verify", help="Run what is recommended for a few steps here, and print the error.")
]
BudgetOption = Annotated[
    Text, typer.Option("--memory-budget", metavar="SIZE", help="Cheapest choice whose peak stays under it.")
]
WriteOption = Annotated[Text, typer.Option("--write", metavar="FILE", help="Write the recommended config.")]
PlotOption = Annotated[Text, typer.Option("--plot", metavar="FILE", help="Draw the plan as .svg or .png.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def plan(
    params: ParamsOption = None,
    model: ModelOption = None,
    world: WorldOption = 1,
    device_memory: DeviceMemoryOption = None,
    host_memory: HostMemoryOption = None,
    per_machine: PerMachineOption = None,
    framework: FrameworkOption = None,
    device: DeviceOption = "cuda",
    micro_batch: MicroBatchOption = None,
    seq_len: SeqLenOption = None,
    accumulation: AccumulationOption = None,
    config: ConfigOption = None,
    trainable: TrainableOption = None,
    precision: PrecisionOption = None,
    optimizer: OptimizerOption = None,
    no_master: MasterOption = False,
    frozen: FrozenOption = 0.0,
    task_samples: SamplesOption = None,
    bandwidth: BandwidthOption = None,
    flops: FlopsOption = None,
    link: LinkOption = None,
    disk: DiskOption = None,
    nvme_path: NvmePathOption = None,
    measure: MeasureOption = False,
    verify: VerifyOption = False,
    memory_budget: BudgetOption = None,
    write: WriteOption = None,
    plot: PlotOption = None,
    json: JsonOption = False,
) -> None:
    """Count the bytes of every stage before the run, and say which stage to take and why; exit code 3: nothing fits."""
    given = dict(locals())
    try:
        from shardledger.cli.plan import run_plan
        from shardledger.cli.plan_options import PlanOptions

        run_plan(PlanOptions(**given))
    except BrokenPipeError:  # the reader (head, less) has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # what is still buffered must not fail at exit either
        raise SystemExit(0) from None
    except (Exception, KeyboardInterrupt) as error:
        report_and_exit(error)
