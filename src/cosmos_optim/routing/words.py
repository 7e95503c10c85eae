"""Words of the names of parameters and modules: split a name, match it with a pattern, and look for whole words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from glob import escape

EDGE = re.compile(r"[\W_]+|(?<=[a-z])(?=[A-Z])")
NUMBER = re.compile(r"\d+$")
LAYER_NUMBER = re.compile(r"(^|\.)\d+(?=\.)")

# A parameter that is a table of vectors, one for each position, token or code. `token_mixing` is not a table, so the
# words of TOKEN count only at the end of a name, or before CHANGE there: PEFT has `trainable_tokens_delta`.
TABLE = frozenset({
    "embed", "embeds", "embedding", "embeddings", "emb", "wte", "wpe", "pos", "position", "positions", "positional",
    "rel", "table", "tables", "codebook", "codebooks", "codevectors", "prototypes", "centroids", "prompt", "prompts",
    "latent", "latents", "freq", "freqs",
})  # fmt: skip
TOKEN = frozenset({"token", "tokens"})
CHANGE = frozenset({"delta"})
POSITION = frozenset({"pos", "position", "positions", "positional", "wpe", "rel", "relative"})  # not a vocabulary
PROJECTION = frozenset({"proj", "projection", "kernel"})  # at the end of a name: not a table, but a matrix for one
BIAS = frozenset({"bias", "biases"})
NORM = frozenset({"norm", "norms", "ln", "layernorm", "rmsnorm", "batchnorm", "groupnorm", "bn"})
SCALE = frozenset({"scale", "scales", "gamma", "beta", "alpha", "gain", "temperature", "tau", "decay"})
EXPERT = frozenset({"expert", "experts", "moe", "mixture"})
ROUTER = frozenset({"router", "gate", "gating"})
ADAPTER = frozenset({"lora"})
# Whole names of the layers of queries and keys.
QUERY = frozenset({"q", "q_proj", "query", "query_proj", "wq", "w_q", "to_q", "q_lin"})
KEY = frozenset({"k", "k_proj", "key", "key_proj", "wk", "w_k", "to_k", "k_lin"})


def words(name: str) -> tuple[str, ...]:
    """Return the words of a name in lower case, without the numbers at their ends.

    >>> words("blocks.12.attn.relPosBias_h2")
    ('blocks', 'attn', 'rel', 'pos', 'bias', 'h')
    """
    parts = (NUMBER.sub("", part).lower() for part in EDGE.split(name))
    return tuple(part for part in parts if part)


def layer_pattern(name: str, others: Iterable[str] = ()) -> str:
    """Return a pattern that matches the same parameter in every layer: whole numbers become `*`.

    A `*` also matches several parts of a name. If the pattern would match one of `others`, it matches this name only.

    >>> layer_pattern("blocks.12.attn.qkv2.weight"), layer_pattern("blocks.12.mix[1]")
    ('blocks.*.attn.qkv2.weight', 'blocks.*.mix[[]1]')
    >>> layer_pattern("0.weight", others=["0.bias"]), layer_pattern("0.weight", others=["1.linear.weight"])
    ('*.weight', '0.weight')
    """
    pattern = LAYER_NUMBER.sub(r"\1*", escape(name))
    return escape(name) if any(matches(other, pattern) for other in others) else pattern


def matches(name: str, pattern: str) -> bool:
    """Return whether a shell pattern matches a parameter's name. A name matches itself, also if it has brackets.

    >>> matches("blocks.0.mix", "blocks.*"), matches("mix[1]", "mix[1]")
    (True, True)
    """
    return name == pattern or fnmatchcase(name, pattern)


def is_table(name: str) -> bool:
    """Return whether a parameter's name is that of a table of vectors."""
    found = words(name)
    last = [word for word in found if word not in CHANGE][-1:]
    is_named = not TABLE.isdisjoint(found) or not TOKEN.isdisjoint(last)
    return is_named and PROJECTION.isdisjoint(found[-1:])


def holds_table(path: str) -> bool:
    """Return whether a module's name ends as that of a table: pos_embed does, rel_attn does not."""
    return not (TABLE | TOKEN).isdisjoint(words(path.rpartition(".")[2])[-1:])
