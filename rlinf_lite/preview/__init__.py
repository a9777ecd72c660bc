"""Previews of a run before it starts: `--dry-run`, its memory, and the placements that fit. May import models."""
