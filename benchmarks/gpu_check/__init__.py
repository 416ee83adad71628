"""Everything that only a real card can show, in under six minutes. Needs torch and NumPy alone."""
