"""``shardledger plan``: one of two questions, states alone (arithmetic) or the whole model (dry run).

Nothing here imports torch: the account of states must answer at once.
"""

from __future__ import annotations

from dataclasses import replace

from shardledger.cli.plan_options import Hardware, PlanOptions, check_options, hardware_of


def run_plan(options: PlanOptions) -> None:
    """Answer; prints to stdout.

    Raises:
        ConfigError: wrong options.
        DoesNotFitError: device memory was given and no choice fits it; the table has been printed.
    """
    check_options(options)
    hardware = hardware_of(options)
    if options.measure and (options.params or options.model):
        hardware = _measured(hardware, options)
    if options.params is not None:
        from shardledger.cli.plan_states import plan_states

        plan_states(options, hardware)
    elif options.model is not None:
        from shardledger.cli.plan_model import plan_model
        from shardledger.cli.plan_run import run_planner

        plan_model(options, hardware, run_planner)
    else:
        from shardledger.cli.measure import print_measurement

        print_measurement(options.nvme_path)


def _measured(hardware: Hardware, options: PlanOptions) -> Hardware:
    """What the options leave open, measured here."""
    from shardledger.cli.measure import measure

    found = measure(options.nvme_path)
    if not options.json:
        print(f"{found}\n")
    return replace(
        hardware,
        bandwidth=found.bandwidth if hardware.bandwidth is None else hardware.bandwidth,
        flops=found.flops if hardware.flops is None else hardware.flops,
        link=found.host if hardware.link is None else hardware.link,
        disk=found.disk if hardware.disk is None else hardware.disk,
    )
