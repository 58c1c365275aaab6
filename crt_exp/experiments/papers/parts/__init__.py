"""Parts of pages: the runs, settings, claims, tables or panels of one experiment each, and the verdicts of all."""
