"""Parts of pages: the sweeps, claims, tables and panels of one experiment each."""
