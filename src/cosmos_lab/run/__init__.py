"""One training run: built, trained, logged, checkpointed, evaluated and exported."""
