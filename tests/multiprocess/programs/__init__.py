"""Random programs: see README.md."""
