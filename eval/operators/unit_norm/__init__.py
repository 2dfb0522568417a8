"""x divided by a norm of it along dimension 1: what rms_norm, l2_norm and mean_abs_norm have in common."""
