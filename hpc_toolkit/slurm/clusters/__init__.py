"""Facts about sites: the layers of files that state them, and their partitions."""
