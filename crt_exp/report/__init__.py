"""Pages of results: sweeps of runs, a table of their rows, and claims, tables and pictures made from it."""

from crt_exp.report.pages import Page
from crt_exp.report.plots import dot_plot, line_plot
from crt_exp.report.rows import Rows, share
from crt_exp.report.statistics import Claim, geometric_mean_ci, mean_ci
from crt_exp.report.sweeps import Run, sweep
from crt_exp.report.text import label, mean_table

__all__ = ["Claim", "Page", "Rows", "Run", "dot_plot", "geometric_mean_ci", "label", "line_plot", "mean_ci",
           "mean_table", "share", "sweep"]
