"""The optional C++ core. `extensor.backends.cpu` is its only user."""
