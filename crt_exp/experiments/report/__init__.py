"""Result pages: sweeps of runs, tables of result rows, claims and figures."""

from crt_exp.experiments.intervals import (
    geometric_interval,
    mean_ci,
    ratio_interval,
)
from crt_exp.experiments.report.claims import Claim, control_checks, training_check
from crt_exp.experiments.report.pages import Page
from crt_exp.experiments.report.plots import dot_plot, line_plot, panels
from crt_exp.experiments.report.rows import Rows, added, share
from crt_exp.experiments.report.sweeps import (
    HOME,
    PlannedRun,
    quoted_override,
    seeds_from,
    staged_sweep,
    sweep,
)
from crt_exp.experiments.report.tables import Tables, filters_over, label, mean_table

__all__ = [
    "HOME",
    "Claim",
    "Page",
    "PlannedRun",
    "Rows",
    "Tables",
    "added",
    "control_checks",
    "dot_plot",
    "filters_over",
    "geometric_interval",
    "label",
    "line_plot",
    "mean_ci",
    "mean_table",
    "panels",
    "quoted_override",
    "ratio_interval",
    "seeds_from",
    "share",
    "staged_sweep",
    "sweep",
    "training_check",
]
