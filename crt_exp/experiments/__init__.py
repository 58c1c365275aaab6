"""Experiments on the library: data, models, tasks, measurements, runs and pages of results."""
