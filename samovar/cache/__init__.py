"""Device memory of the paged cache."""
