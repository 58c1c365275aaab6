"""What a page cannot declare in its file: `claims`, `sections`, `figure` or `first_lines`, a module a page."""
