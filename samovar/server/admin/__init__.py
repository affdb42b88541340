"""What an operator may do to a running server: put it to sleep, pause it, empty caches, profile it, look inside."""
