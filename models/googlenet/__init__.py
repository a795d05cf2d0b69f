"""GoogLeNet."""
