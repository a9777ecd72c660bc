"""A small policy that chooses the noise from which a frozen flow policy acts (DSRL)."""
