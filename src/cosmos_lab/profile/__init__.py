"""Memory, time and throughput of optimizers on one model."""
