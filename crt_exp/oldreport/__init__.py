"""Tables and figures beside the papers' values: `python -m crt_exp.oldreport NAME`; a page is a file of conf/report."""
