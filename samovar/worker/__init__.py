"""One rank: the device, the bound model, its cache, and the steps it runs."""
