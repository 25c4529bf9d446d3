"""Measuring ops on named workloads: problems made on the device, gates, floors and timing."""
