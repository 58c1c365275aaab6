"""Models that no library has, or that must take any attention."""
