"""Tables and figures beside the papers' values: `python -m crt_exp.report NAME`; a page is a file of conf/report."""
