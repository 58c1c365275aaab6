"""One module for each task; `base.py` defines their common interface."""
