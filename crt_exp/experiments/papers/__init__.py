"""The pages of results: one file a page, see crt_exp.experiments.report.pages."""
