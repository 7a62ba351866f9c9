"""What is known of sites: facts, the layers of files they come from, their partitions."""
