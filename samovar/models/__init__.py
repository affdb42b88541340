"""Model families: one file each, holding the mathematics and nothing else."""
