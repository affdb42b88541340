"""The mesh of devices: who this rank is along each axis, and the collectives that layers use."""
