"""The command line: what it does, and that every mistake ends in one clear line and exit code 2."""

import errno
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import cosmos_lab
import cosmos_optim
from cosmos_lab.cli import commands
from cosmos_lab.cli.flags import CompareCommand, CompareOptions, parse, parse_extra, parse_lrs
from cosmos_lab.cli.main import main
from cosmos_lab.config import RunConfig
from cosmos_lab.profile.config import ProfileConfig
from cosmos_lab.recipes import RECIPES

tyro = pytest.importorskip("tyro")


@pytest.fixture
def small(tiny_run: RunConfig) -> list[str]:
    """Return flags that turn any recipe into a run of a second."""
    c = tiny_run
    return [
        "--model", "tiny", "--width", "64", "--depth", "1", "--mlp", "96", "--vocab-size", "64", "--data", c.data.data,
        "--seq-len", "16", "--steps", "4", "--batch", "4", "--val-tokens", "256", "--device", "cpu",
        "--out", c.logging.out, "--cache-dir", str(c.data.cache_dir), "--checkpoint-every", "2", "--rank", "8",
    ]  # fmt: skip


def test_a_trained_run_can_be_reported_and_exported(
    small: list[str], tiny_run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "llama-130m", "--scale", "0.1", *small, "--lr", "3e-3", "--name", "mine"]) == 0
    folder = Path(tiny_run.logging.out) / "mine"
    about = json.loads((folder / "config.json").read_text())
    assert about["lr"] == 3e-3 and about["recipe"] == "llama-130m" and about["config"]["schedule"] == "linear"
    assert "done: final_val_loss" in capsys.readouterr().out
    assert main(["train", "llama-130m", "--scale", "0.1", *small, "--lr", "3e-3", "--name", "mine"]) == 0
    assert "done earlier: final_val_loss" in capsys.readouterr().out
    quick = [flag for flag in small if flag not in ("--rank", "8")]
    assert main(["train", "llama-130m", "--optimizer", "soap", *quick, "--name", "other"]) == 0
    other = json.loads((folder.with_name("other") / "config.json").read_text())
    assert (other["optimizer"], other["lr"], other["adam_lr"], other["config"]["rank"]) == ("soap", 2e-3, 2e-3, None)
    assert main(["report", str(folder), "-o", str(tmp_path / "page")]) == 0
    assert "cosmos" in (tmp_path / "page" / "index.html").read_text().lower()
    assert main(["export", str(folder), "-o", str(tmp_path / "llama")]) == 0
    assert json.loads((tmp_path / "llama" / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize(
    ("flags", "rates"),
    [
        (["--optimizer", "soap", "--lr", "1e-3"], (1e-3, 1e-3)),
        (["--optimizer=galore", "--lr=1e-3"], (1e-3, 1e-3)),
        (["--optimizer", "soap"], (2e-3, 2e-3)),
        (["--optimizer", "soap", "--lr", "1e-3", "--adam-lr", "2e-3"], (1e-3, 2e-3)),
        (["--optimizer", "soap", "--lr", "1e-3", "--adam_lr=2e-3"], (1e-3, 2e-3)),
        (["--optimizer", "muon", "--lr", "1e-3"], (1e-3, 2e-3)),
        (["--lr", "1e-3"], (1e-3, 2e-3)),
    ],
)
def test_adam_lr_follows_lr_if_the_recipe_gives_the_optimizer_one_rate(
    flags: list[str], rates: tuple[float, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[RunConfig] = []
    summary = {"status": "done"}
    monkeypatch.setattr("cosmos_lab.run.train.train", lambda config, progress: asked.append(config) or summary)
    assert main(["train", "llama-130m", "--out", str(tmp_path), *flags]) == 0
    assert (asked[0].optimizer.lr, asked[0].optimizer.adam_lr) == rates


def test_compare_runs_the_grid_asked_for(
    small: list[str], tiny_run: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--optimizers", "adam,cosmos", "--lrs", "adam=1e-2;cosmos=1e-3,2e-3", "--seeds", "3"]
    assert main(["compare", "tiny", *small, *asked]) == 0
    result = json.loads((Path(tiny_run.logging.out) / "compare.json").read_text())
    assert [(row["optimizer"], row["lr"], row["seeds"]) for row in result["rows"]] == [
        ("adam", 1e-2, [3]), ("cosmos", 1e-3, [3]), ("cosmos", 2e-3, [3]),
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert "best" in out and "3 of 3 runs done" in out
    edge = "highest, 2e-3" if result["rows"][2]["best"] else "lowest, 1e-3"
    assert f"The best rate is at the edge of the rates tried for cosmos ({edge}): one beyond" in out
    assert "2 of 3  tiny-cosmos-lr0.001-s3  running" in out
    assert re.search(r"^1 of 3 runs ended, about \d+:\d\d left$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ([], True),
        (["--data", "data/wiki_t5", "--micro-batch", "8", "--seeds", "1,2", "--out", "elsewhere"], True),
        (["--steps", "10"], False),
        (["--val-tokens", "1024"], False),
        (["--scale", "0.5"], False),
        (["--extra", "muon:ns_steps=3"], False),
    ],
)
def test_published_perplexities_are_shown_only_for_the_recipes_own_set_up(
    flags: list[str], shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cosmos_lab.grid.compare.compare", lambda runs, **how: {"rows": []})
    assert main(["compare", "llama-130m", *flags]) == 0
    out = capsys.readouterr().out
    assert out.startswith("published perplexity, on the paper's data: adam 21.28, ") if shown else not out


def test_compare_runs_only_the_rows_and_fields_asked_for(
    small: list[str], tiny_run: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = [flag for flag in small if flag not in ("--rank", "8")] + ["--micro-batch", "2", "--steps", "2"]
    chosen = ["--optimizers", "adam,soap", "--lrs", "2e-3", "--extra", "soap:frequency=10"]
    assert main(["compare", "wiki-60m", *quick, *chosen, "--minutes", "5"]) == 0
    assert main(["compare", "wiki-60m-ablations", *quick, "--only", "rank-32+gamma-0.5,nesterov"]) == 0
    names = sorted(path.name for path in Path(tiny_run.logging.out).iterdir() if path.is_dir())
    assert names == [
        "report", "wiki-60m-ablations-cosmos-paper-lr0.0005-nesterovTrue-s0",
        "wiki-60m-ablations-cosmos-paper-lr0.0005-rank32-gamma0.5-s0",
        "wiki-60m-adam-lr0.002-s0", "wiki-60m-soap-lr0.002-frequency10-s0",
    ]  # fmt: skip
    assert "cosmos-paper lr 0.0005 rank 64 nesterov=True" in capsys.readouterr().out


def test_compare_and_train_take_dtypes_as_text(
    small: list[str], tiny_run: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run with state in float32, one in int8, and one of `train`."""
    quick = [*small, "--steps", "2"]
    extra = "cosmos:;cosmos:momentum_dtype=int8,adam_dtype=int8"
    assert main(["compare", "tiny", *quick, "--optimizers", "cosmos", "--lrs", "1e-3", "--extra", extra]) == 0
    names = sorted(path.name for path in Path(tiny_run.logging.out).iterdir() if path.name.startswith("tiny-cosmos"))
    assert names == [
        "tiny-cosmos-lr0.001-momentum_dtypetorch.int8-adam_dtypetorch.int8-s0", "tiny-cosmos-lr0.001-s0",
    ]  # fmt: skip
    assert main(["train", "tiny", *quick, "--options", "adam_dtype=int8", "--name", "one"]) == 0
    assert '"adam.adam_dtype": "torch.int8"' in (Path(tiny_run.logging.out) / "one" / "config.json").read_text()


def test_profile_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch", "1", "--accumulation", "1", "--seq-len", "16", "--iterations", "1", "--vocab-size", "64"]
    assert main(["profile", "tiny", *sizes, "--tables", "memory", "--optimizers", "adam", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "Memory and time of one iteration of tiny: batch 1, accumulation 1\noptimizer  peak GiB" in out
    assert "forward + backward s" in out and "_" not in out
    assert sum(line.startswith("adam ") for line in out.splitlines()) == 1


def test_profile_takes_options_of_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch", "1", "--accumulation", "1", "--seq-len", "16", "--iterations", "1", "--vocab-size", "64"]
    rows = ["adam:adam_dtype=int8", "cosmos:momentum_dtype=int8+rank=4"]
    assert main(["profile", "tiny", *sizes, "--tables", "memory", f"--optimizers={','.join(rows)}"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if "=" in line and "measured" not in line] == rows


def test_recipes_lists_every_recipe_and_profile(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in (*RECIPES, "profile-memory"))
    groups = [part.splitlines() for part in out.split("\n\n")]
    assert groups[1][0].startswith("Begin here") and groups[1][1].startswith("  tiny")
    assert [lines[0].split()[0] for lines in groups[2:]] == ["Comparisons", "Comparisons", "Profiles:"]


def test_ctrl_c_while_a_command_is_imported_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(command: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cosmos_lab.cli.main._find", interrupted)
    assert main(["compare", "tiny"]) == 130
    message = "interrupted; run the same command again to continue"  # not all commands have checkpoints
    assert capsys.readouterr().err == f"cosmos-lab: {message}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tran"], "there is no command 'tran'; did you mean train?"),
        (["train"], "the recipe comes first"),
        (["train", "llama-130"], "unknown recipe 'llama-130'; did you mean llama-130m"),
        (["train", "tiny", "--scale", "big"], "--scale takes a number"),
        (["train", "tiny", "--scale", "7"], r"--scale must be in (0, 1]; got 7.0"),
        (["train", "tiny", "--warmup", "2"], "--warmup is a share"),
        (["train", "llama-130m"], "missing shard"),
        (
            ["train", "tiny", "--stepz", "3"],
            "there is no flag --stepz; did you mean --steps? `cosmos-lab train tiny --he",
        ),
        (["train", "tiny", "--learning-rate", "3"], "there is no flag --learning-rate; did you mean --lr?"),
        (["train", "tiny", "--batch_size=8"], "there is no flag --batch-size; did you mean --batch?"),
        (["train", "tiny", "--quux", "3"], "there is no flag --quux; `cosmos-lab train tiny --help` lists the flags"),
        (["train", "tiny", "-lr", "3"], "there is no flag -lr; did you mean --lr? `cosmos-lab train tiny"),
        (["train", "tiny", "--no-resume"], "there is no flag --no-resume; did you mean --resume?"),
        (["train", "tiny", "3"], "'3' is not a flag; `cosmos-lab train tiny --help` lists the flags"),
        (["train", "tiny", "--lr"], "--lr takes one value; got none; `cosmos-lab train tiny --help` lists the flags"),
        (["train", "tiny", "--lr", "1", "2"], "--lr takes one value; got 1 2;"),
        (["train", "tiny", "--lr", "abc"], "--lr takes a number; got 'abc'"),
        (["train", "tiny", "--steps=1e3"], "--steps takes a whole number; got '1e3'"),
        (["train", "tiny", "--width", "none"], "--width takes a whole number or None; got 'none'"),
        (["train", "tiny", "--schedule", "linaer"], "--schedule must be one of linear, cosine, wsd, constant; got '"),
        (["train", "tiny", "--checkpointing", "yes"], "takes no value; got 'yes': give --checkpointing or --no-check"),
        (["train", "tiny", "--optimizer", "--lr", "1"], "--optimizer takes one value; got none"),
        (["train", "tiny", "--scale"], "--scale takes one value; got none"),
        (["report", "runs", "-o"], "--out takes one value; got none"),
        (["profile", "tiny", "--tables", "mfu,memry"], "--tables must be one of memory, throughput, mfu; got 'memry'"),
        (["profile", "tiny", "--micro-batches", "8,x"], "--micro-batches takes a whole number; got 'x'"),
        (["profile", "tiny", "--optimizers"], "--optimizers needs at least one value"),
        (["compare", "tiny", "--learning-rates", "3"], "there is no flag --learning-rates; did you mean --lrs?"),
        (["compare", "tiny", "--lr", "1"], "a comparison takes --lrs, not --lr"),
        (["compare", "tiny", "--lr=1e-3"], "a comparison takes --lrs, not --lr"),  # which is the recipe's own
        (["compare", "tiny", "--optimizers", "adam,cosmoss"], "unknown optimizer 'cosmoss'; did you mean cosmos"),
        (["compare", "tiny", "--name", "mine"], "a comparison names its runs itself: choose their folder with --out"),
        (["compare", "tiny", "--optimizers", "adam", "--lrs", "adm=1e-3"], "--lrs has rates for adm, but"),
        (["compare", "tiny", "--seeds", "a"], "--seeds takes whole numbers separated by commas; got 'a'"),
        (["compare", "llama-130m", "--optimizers", "normuon"], "give them with --lrs"),
        (["compare", "tiny", "--minutes", "-1"], "--minutes must be 0 (no limit) or more; got -1"),
        (["compare", "tiny", "--only", "rank-5"], "--only rank-5 matches no run; the runs are base"),
        (["compare", "tiny", "--extra", "frequency=10"], "--extra takes optimizer:name=value"),
        (["compare", "tiny", "--extra", "soap:frequency"], "--extra takes name=value"),
        (["profile", "llama-2b"], "no preset 'llama-2b'"),
        (["report"], "RUNS comes first"),
        (["report", "nowhere"], "nowhere"),
        (["export", "nowhere"], "there is no run folder nowhere"),
        (["export", "A", "B", "-o", "C"], "export takes one run folder; got A, B"),
        (["recipes", "foo"], "recipes takes no arguments; got foo"),
        (["profile", "tiny", "--tables", "mfu", "--micro-batches", "0"], "--micro-batches must be positive; got 0"),
        (["profile", "tiny", "--memory-cap-gb", "inf"], "--memory-cap-gb must be positive and finite; got inf"),
        (["data", "prepare", "nowhere.txt"], "no text at 'nowhere.txt'"),
        (["data", "fetch", "c4"], "data has one subcommand, prepare"),
        (["data", "prepare", "c4", "--val-fraction", "7"], "val_fraction is 7.0; it must be between 0 and 1"),
    ],
)
def test_a_mistake_ends_in_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("cosmos-lab: ") and message in error and error.count("\n") <= 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["train", "tiny"], "choose another --out"),
        (["compare", "tiny", "--optimizers", "adam", "--lrs", "1e-3"], "choose another --out"),
        (["report", "."], "choose another folder with -o"),
        (["data", "prepare", "text.txt", "--tokenizer", "train:300"], "choose another --out"),
        (["profile", "tiny", "--tables", "memory", "--optimizers", "adam", "--seq-len", "8", "--iterations", "1"],
         "choose another --out"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_a_place_that_cannot_be_written_is_named_in_plain_words(
    arguments: list[str],
    advice: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a file, not a folder")
    (tmp_path / "config.json").write_text("{}")
    assert main([*arguments, "--out", "text.txt/inside"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(rf"cosmos-lab: cannot write text.txt/inside\S*: (Not a directory|File exists); {advice}", error)


def test_a_file_that_cannot_be_read_is_named_in_plain_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(arguments: list[str]) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "runs/mine")

    monkeypatch.setitem(commands.COMMANDS, "report", refuse)
    assert main(["report", "runs"]) == 2
    assert capsys.readouterr().err == "cosmos-lab: runs/mine: Permission denied\n"


def test_a_gradient_that_is_refused_because_it_is_not_finite_ends_in_one_line(
    small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--lr", "1e30", "--adam-lr", "1e30", "--warmup", "0", "--options", "nonfinite=raise"]
    assert main(["train", "tiny", *small, *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("cosmos-lab: the gradient of parameter ") and error.count("\n") == 1


@pytest.mark.parametrize("memory", [True, False])
def test_only_a_run_that_is_out_of_memory_ends_in_one_line_that_says_what_to_do(
    memory: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arguments: list[str]) -> None:
        raise (torch.OutOfMemoryError if memory else RuntimeError)("CUDA out of memory. Tried 2 GiB.\nmore lines")

    monkeypatch.setitem(commands.COMMANDS, "train", fail)
    if not memory:
        with pytest.raises(RuntimeError):
            main(["train", "tiny"])
        return
    assert main(["train", "tiny"]) == 2
    message = "CUDA out of memory. Tried 2 GiB. Try a smaller --micro-batch; docs/troubleshooting.md has more ways"
    assert capsys.readouterr().err == f"cosmos-lab: {message}\n"


def test_without_tyro_one_line_names_the_extra_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert main(["train", "tiny", "--steps", "3"]) == 2
    message = "the commands need the package tyro: pip install tyro, or '.[lab]' in the source folder"
    assert capsys.readouterr().err == f"cosmos-lab: {message}\n"


def test_without_the_extra_one_line_says_how_to_install_it() -> None:
    """In another process, because this one has imported numpy: `pip install .` alone does not bring it."""
    code = "import sys; sys.modules['numpy'] = None; from cosmos_lab.cli.main import main; sys.exit(main(['demo']))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("cosmos-lab: ") and done.stderr.count("\n") == 1
    assert "pip install '.[lab]'" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["--version"], ["recipes"]])
def test_what_needs_no_torch_does_not_wait_for_it(arguments: list[str]) -> None:
    code = f"import sys; from cosmos_lab.cli.main import main; main({arguments}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_one_version_is_in_the_package_the_lab_and_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert cosmos_optim.__version__ == cosmos_lab.__version__ == project["version"]
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"cosmos-lab {project['version']}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["recipes"], ["train", "tiny", "--help"]])
def test_a_closed_pipe_ends_a_command_quietly(arguments: list[str]) -> None:
    """As `cosmos-lab --help | head -1` closes it."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run([sys.executable, "-m", "cosmos_lab", *arguments], stdout=closed, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_command_ends_well_where_a_path_has_spaces_and_the_locale_lacks_its_letters(tmp_path: Path) -> None:
    (tmp_path / "ü b").mkdir()
    (tmp_path / "ü b" / "text.txt").write_text(" ".join(map(str, range(2000))))
    command = [sys.executable, "-m", "cosmos_lab", "data", "prepare", "ü b", "--tokenizer", "train:300", "--out", "ü b"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "use them with --data '? b/? b_bpe300'" in done.stdout


def test_flags_set_the_fields_of_their_dataclass() -> None:
    run = parse(RunConfig(), ["--lr", "0.25", "--clip", "None", "--checkpointing", "--options", "a=1", "b=2"], prog="x")
    assert run == RunConfig().replace(lr=0.25, clip=None, checkpointing=True, options=("a=1", "b=2"))
    grid = parse(CompareCommand(), ["--optimizers", "adam", "--parallel", "3", "--schedule", "wsd"], prog="x")
    assert (grid.compare, grid.run) == (
        CompareOptions(optimizers="adam", parallel=3), RunConfig().replace(schedule="wsd"),
    )  # fmt: skip
    flags = ["--optimizers", "adam", "muon", "--tables", "mfu", "--micro-batches", "8", "16", "--out", "x"]
    expected = ProfileConfig(optimizers=("adam", "muon"), tables=("mfu",), micro_batches=(8, 16), out="x")
    assert parse(ProfileConfig(), flags, prog="x") == expected


def test_every_field_of_a_run_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "tiny", "--help"])
    out = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in out for name in RunConfig().flat())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            ["train"],
            ("RECIPE", "cosmos-lab train tiny --help", "model options", "schedule options", "--seq-len", "--lr"),
        ),
        (
            ["compare"],
            ("RECIPE", "cosmos-lab compare tiny --help", "compare options", "--optimizers", "--lrs", "--batch"),
        ),
        (["profile"], ("MODEL", "cosmos-lab profile llama-1b --help")),
        (["report"], ("RUNS", "--title")),
        (["export"], ("RUN", "--tokenizer")),
        (["data"], ("prepare", "--max-tokens", "--unit")),
        (["data", "prepare"], ("wikitext-103", "--max-tokens", "--unit")),
    ],
)
def test_help_of_each_command_shows_its_flags_or_how_to_list_them(
    command: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and all(word in out for word in words)


def test_lrs_and_extra_are_read_or_refused_with_their_flag() -> None:
    assert parse_lrs(None) is None
    with pytest.raises(ValueError, match="--lrs takes numbers"):
        parse_lrs("fast")
    assert parse_extra(None) == []
    assert parse_extra("soap: frequency=10; cosmos:") == [("soap", {"frequency": 10}), ("cosmos", {})]
    assert parse_extra("muon:adam_dtype=int8,ns_dtype=none") == [("muon", {"adam_dtype": torch.int8, "ns_dtype": None})]


def test_help_and_an_empty_command_print_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0 and main([]) == 2
    out = capsys.readouterr().out
    assert all(name in out for name in commands.COMMANDS)
