"""A model's name -> files on this machine: local paths, embedded aliases, hub ids. The only room with a network."""
