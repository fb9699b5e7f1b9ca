"""Gate vectors with everything else integrated out: their evidence, their moments and draws."""
