"""``shardledger plan``: one of two questions, states alone (arithmetic) or the whole model (dry run).

Nothing here imports torch: the account of states must answer at once.
"""

from __future__ import annotations

from shardledger.cli.plan_options import PlanOptions, check_options, hardware_of


def run_plan(options: PlanOptions) -> None:
    """Answer; prints to stdout.

    Raises:
        ConfigError: wrong options.
        DoesNotFitError: device memory was given and no choice fits it; the table has been printed.
    """
    check_options(options)
    if options.params is not None:
        from shardledger.cli.plan_states import plan_states

        plan_states(options, hardware_of(options))
    elif options.model is not None:
        from shardledger.cli.plan_model import plan_model

        plan_model(options, hardware_of(options))
    else:
        from shardledger.cli.measure import print_measurement

        print_measurement()
