"""The table of a sweep: the best setting of each optimizer, differences, variants, token shares, and every run."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping

from benchmarks.best_rows import Row, best_rows, changed_pairs, gaps_between, paired, token_shares
from benchmarks.kept_runs import Result, texts_of
from benchmarks.protocol import Protocol
from benchmarks.student import half_width
from benchmarks.variants import VARIANTS


def table(protocol: Protocol, results: Mapping[str, Result]) -> str:
    """Return what is known: the best setting of each optimizer, differences, token shares, and every run."""
    mine = {name: r for name, r in results.items() if r["model"] == protocol.model}
    lines = list(_cautions(mine.values()))
    for name, regime in protocol.regimes.items():
        if not any(r["regime"] == name for r in mine.values()):
            continue
        rows = best_rows(protocol, name, results)
        shares = token_shares(protocol, name, rows, results)
        lines += ["", f"{protocol.model}, regime {name}: {regime.steps} steps of {regime.batch} x {regime.seq_len}"]
        lines += [*_settings(rows), *_differences(rows), *_variants(protocol, name, mine)]
        lines += [f"  {e} reaches AdamW's mean test loss with a share of the tokens of {s}" for e, s in shares.items()]
        lines += _every_run(name, mine)
    return "\n".join(lines).strip("\n")


def _cautions(results: Collection[Result]) -> Iterator[str]:
    for regime in sorted({r["regime"] for r in results}):
        texts = {texts_of(r) for r in results if r["regime"] == regime}
        if len(texts) > 1:
            yield f"CAUTION: the runs of regime {regime} saw {len(texts)} texts"
    if (commits := len({r["commit"] for r in results})) > 1:
        yield f"CAUTION: these are runs of {commits} commits"


def _settings(rows: Mapping[str, Row]) -> Iterator[str]:
    """Yield the best setting of each optimizer with its perplexities, the best optimizer first."""
    yield f"{'':13}{'hidden':>9}{'outer':>9}{'beta2':>7}{'runs':>6}{'val ppl':>9}{'test ppl':>10}  status"
    for entry, row in sorted(rows.items(), key=lambda item: item[1].run["val_loss"]):
        r = row.run
        ppl = [s["test_ppl"] for s in row.seeds]
        over = f"{len(ppl)} seeds, sd {statistics.stdev(ppl):.3f}" if len(ppl) > 1 else "one seed"
        yield (
            f"{entry:13}{r['lr']:9.3g}{r['adam_lr']:9.3g}{r['beta2']:7g}{row.tuned:6d}{r['val_ppl']:9.3f}"
            f"{statistics.fmean(ppl):10.3f}  {over}; {row.status}"
        )


def _differences(rows: Mapping[str, Row]) -> Iterator[str]:
    """Yield each optimizer's test loss minus COSMOS's, paired by seed."""
    if "cosmos" not in rows:
        return
    for entry, row in rows.items():
        pairs, gaps = paired(row, rows["cosmos"]), gaps_between(row, rows["cosmos"])
        if entry == "cosmos" or not gaps:
            continue
        blocks = []
        for block in range(len(pairs[0][0]["test_blocks"])):
            over_seeds = [theirs["test_blocks"][block] - own["test_blocks"][block] for theirs, own in pairs]
            blocks.append(statistics.fmean(over_seeds))
        line = f"  {entry} - cosmos: {statistics.fmean(gaps):+.4f} nats"
        if len(gaps) > 1:
            later = statistics.fmean(gaps[1:])
            line += f" +- {half_width(gaps):.4f} ({len(gaps)} seeds; without the first, {later:+.4f})"
        yield f"{line}; blocks of the test text {min(blocks):+.4f} to {max(blocks):+.4f}"


def _variants(protocol: Protocol, regime: str, results: Mapping[str, Result]) -> Iterator[str]:
    """Yield each variant's test loss minus that of the same run without it, paired by seed, for each setting."""
    for run, pairs in changed_pairs(protocol, regime, results).items():
        found = [changed["test_loss"] - plain["test_loss"] for changed, plain in pairs]
        spread = f" +- {half_width(found):.4f} (sd {statistics.stdev(found):.4f})" if len(found) > 1 else ""
        shown = f"{statistics.fmean(found):+.4f} nats{spread}, {len(found)} seed(s)"
        setting = f"at {run.lr:g}, {run.adam_lr:g}, beta2 {run.beta2:g}"
        yield f"  {run.entry} with {run.variant}: {shown} {setting}; {VARIANTS[run.variant].formula}"


def _every_run(regime: str, results: Mapping[str, Result]) -> Iterator[str]:
    """Yield each run of a regime with its perplexities."""
    yield "  all runs: validation and test perplexity"
    for run_id, r in sorted(results.items()):
        if r["regime"] == regime:
            both = "diverged" if r["val_loss"] is None else f"{r['val_ppl']:.3f} {r['test_ppl']:.3f}"
            yield f"    {run_id}  {both}"
