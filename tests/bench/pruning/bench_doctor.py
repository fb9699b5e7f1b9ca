"""The doctor beside trainings whose faults are known: python tests/bench/pruning/bench_doctor.py [--only NAME]

Trainings with a planted fault are looked at once, and their own finding is to be among what is found. Healthy ones are
looked at at their start, after a twentieth, a fifth and a half of their steps, and at their end, and nothing is to be
found. Ends with 1 if a fault is missed or a healthy training has a finding. Takes three minutes on one core.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.diagnostics.doctor_faults import FAULTS
from tests.diagnostics.doctor_runs import HEALTHY, start

LOOKS = (0.0, 0.05, 0.2, 0.5, 1.0)


def faults(only: str) -> int:
    """Print what is found of each fault; how many were missed."""
    print("| fault | after | to be found | found | seconds |\n|---|---|---|---|---|")
    missed = 0
    for name, fault in FAULTS.items():
        if only not in name:
            continue
        begin = time.process_time()
        codes = start(fault.make).to(fault.share).diagnosis().codes
        missed += fault.code not in codes
        seconds = time.process_time() - begin
        found = ", ".join(codes) + ("" if fault.code in codes else " !")
        print(f"| {name} | {fault.share:.0%} | {fault.code} | {found} | {seconds:.1f} |", flush=True)
    return missed


def healthy(only: str, seed: int) -> int:
    """Print what is found in healthy trainings; how many have a finding."""
    print("\n| healthy training | found | seconds |\n|---|---|---|")
    alarms = 0
    for name, make in HEALTHY.items():
        if only not in name:
            continue
        begin = time.process_time()
        run = start(make, seed)
        found = [f"{look:.0%}: {', '.join(codes)} !" for look in LOOKS if (codes := run.to(look).diagnosis().codes)]
        alarms += bool(found)
        print(f"| {name} | {'; '.join(found) or 'nothing'} | {time.process_time() - begin:.1f} |", flush=True)
    return alarms


def main() -> None:
    """Both tables, and a line of the totals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose names hold this")
    parser.add_argument("--seed", type=int, default=1, help="of the healthy trainings")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # what trainings with faults are warned of
    missed = faults(options.only)
    alarms = healthy(options.only, options.seed)
    print(f"\n{missed} faults missed, {alarms} healthy trainings with a finding")
    sys.exit(1 if missed or alarms else 0)


if __name__ == "__main__":
    main()
