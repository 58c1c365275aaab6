"""Policies with implicit attention that learn by evolution strategies."""
