"""Native CPU kernels for experts: :mod:`bindings` finds and chooses them, :mod:`layers` calls them, :mod:`pool` has
their threads. The C sources are in ``native/``. No torch here."""
