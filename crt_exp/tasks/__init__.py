"""One file for each task; `base.py` says what they share."""
