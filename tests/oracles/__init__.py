"""Reference implementations in plain fp64 numpy, one matrix at a time, written from the papers and nothing else.

They share no code with `cosmos_optim` (no torch either): a mistake would have to be made twice to pass a test.
Every oracle is a class with one method, `step(W, G) -> W`, which takes and returns `(m, n)` arrays and keeps its state
under the paper's letters.
"""
