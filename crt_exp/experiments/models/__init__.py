"""Models that the libraries lack, or that accept any attention."""
