"""Tables and figures beside the papers' values: `python -m crt_exp.report NAME`, one module for each target."""
