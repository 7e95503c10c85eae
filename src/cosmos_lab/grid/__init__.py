"""Many runs: a grid over optimizers, rates and seeds."""
