"""Run folders, read and ranked in one place for training, comparisons and reports."""
