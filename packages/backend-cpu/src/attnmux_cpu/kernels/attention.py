"""Attention of one layer over a whole batch."""

from __future__ import annotations

from attnmux_cpu.kernels.fused import can_fuse, run_fused
from attnmux_cpu.kernels.grouped import run_group
from attnmux_cpu.kernels.problem import Problem
from attnmux_cpu.kernels.schedule import Schedule
from attnmux_cpu.kernels.single import run_single


def run(problem: Problem, schedule: Schedule) -> None:
    """Attend for every request of `schedule`; each row of the batch is written once."""
    for group in schedule.groups:
        run_group(problem, group)
    for request in schedule.singles:
        if can_fuse(problem, request):
            run_fused(problem, request)
        else:
            run_single(problem, request)
    for rows in schedule.empty_rows:
        problem.end_empty(rows, problem.sinks)
    if schedule.padding is not None:
        problem.end_empty(schedule.padding, None)
