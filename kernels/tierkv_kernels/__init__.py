"""tierkv's attention kernels."""
