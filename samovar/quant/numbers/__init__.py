"""Number formats: what each code means, and which code a number gets. Plain torch; every kernel is compared with these."""
