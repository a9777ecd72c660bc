"""What a run will need and do, said before it starts: `--dry-run`, and memory. Stands above models."""
