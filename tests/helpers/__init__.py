"""Models, data, cases and small programs that several tests share."""
