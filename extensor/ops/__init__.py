"""The operations, one file per family. What a family's `__all__` names is public in `extensor`."""
