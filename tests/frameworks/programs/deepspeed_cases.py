"""Cases of `attach` and `enable`, each a function, run one after another on the same ranks; failures are reported.

deepspeed_cases.py <url> <names of cases, by commas>
"""

from __future__ import annotations

import sys
import time
import traceback

import deepspeed

import deepspeed_incidents
import deepspeed_loads
import deepspeed_nvme
import deepspeed_saves
from dcp_remote.integrations.runs import close_managers
from tests.support.rank_programs import leave_process_group, report

CASES = {
    function.__name__: function
    for function in (
        deepspeed_loads.options_of_a_load,
        deepspeed_loads.frozen_parameters_are_left_out,
        deepspeed_loads.an_engine_for_evaluation,
        deepspeed_loads.a_parameter_of_another_shape,
        deepspeed_loads.an_extra_state_that_is_a_tensor,
        deepspeed_loads.a_usual_load_warns_of_nothing,
        deepspeed_loads.what_is_missing_is_an_error,
        deepspeed_loads.going_back_and_saving_by_another_tag,
        deepspeed_loads.saved_before_the_first_step,
        deepspeed_loads.others_load_it,
        deepspeed_loads.stages_go_on_alike,
        deepspeed_loads.linear_layers_of_stage_3,
        deepspeed_saves.saves_in_the_background,
        deepspeed_saves.every_class_is_patched,
        deepspeed_saves.folders_go_below_a_url,
        deepspeed_saves.nothing_is_gathered,
        deepspeed_saves.memory_stays_within_the_budget,
        deepspeed_saves.a_rank_that_raises,
        deepspeed_saves.a_rank_that_raises_in_the_background,
        deepspeed_saves.a_rank_that_does_not_come,
        deepspeed_saves.what_cannot_be_saved_is_refused_in_the_call,
        deepspeed_saves.parallelism_is_refused,
        deepspeed_incidents.incident_0,
        deepspeed_incidents.incident_0_of_a_url,
        deepspeed_incidents.incident_4_saved,
        deepspeed_incidents.incident_4_loaded,
        deepspeed_incidents.is_not_killed,
        deepspeed_incidents.is_killed,
        deepspeed_incidents.goes_on,
        *deepspeed_nvme.CASES,
    )
}


def main() -> None:
    url, names = sys.argv[1:3]
    deepspeed.init_distributed("gloo")
    for name in names.split(","):
        began = time.monotonic()
        try:
            CASES[name](f"{url}/{name}")
            close_managers()
        except BaseException:
            report(**{name: traceback.format_exc()})
            raise
        report(**{name: "passed"})
        sys.stdout.write(f"{name}: {time.monotonic() - began:.1f} s\n")
    leave_process_group()


if __name__ == "__main__":
    main()
