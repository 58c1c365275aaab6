"""Result pages: sweeps of runs, tables of result rows, claims and figures."""

from crt_exp.experiments.report.pages import Page, label, mean_table
from crt_exp.experiments.report.plots import dot_plot, line_plot
from crt_exp.experiments.report.rows import (
    Claim,
    Rows,
    geometric_interval,
    geometric_mean_ci,
    interval_or_range,
    mean_ci,
    share,
)
from crt_exp.experiments.report.sweeps import Run, quoted_override, sweep

__all__ = [
    "Claim",
    "Page",
    "Rows",
    "Run",
    "dot_plot",
    "geometric_interval",
    "geometric_mean_ci",
    "interval_or_range",
    "label",
    "line_plot",
    "mean_ci",
    "mean_table",
    "quoted_override",
    "share",
    "sweep",
]
