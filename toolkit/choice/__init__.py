"""Choosing buckets: what a workload needs, which lists serve it best, and what serving would do."""
