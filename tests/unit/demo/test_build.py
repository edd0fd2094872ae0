"""Demo model and files: the warm start is deterministic and teaches, the build is cached, atomic and silent."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from dataflex_verl.demo import build
from dataflex_verl.demo import warm_start as warm_start_module
from dataflex_verl.demo.build import DemoFiles, DemoSettings, build_demo
from dataflex_verl.demo.model import make_model
from dataflex_verl.demo.tasks import make_splits
from dataflex_verl.demo.tokenizer import make_tokenizer
from dataflex_verl.demo.warm_start import IGNORED, WarmStart, encode, warm_start

SHORT = DemoSettings(train_per_domain=8, val_per_domain=4, hidden=32, warm_start=WarmStart(steps=4, batch_size=12))


def short_warm_start(seed: int, steps: int = 4) -> tuple[LlamaForCausalLM, float]:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed, hidden=32)
    tasks = make_splits(seed, 8, 4).warm_start
    return model, warm_start(model, tokenizer, tasks, seed, replace(SHORT.warm_start, steps=steps))


def flat(model: LlamaForCausalLM) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_model_of_one_seed_is_equal_and_leaves_the_global_generator_alone() -> None:
    tokenizer = make_tokenizer()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, second, other = (make_model(tokenizer, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(flat(first), flat(second))
    assert not torch.equal(flat(first), flat(other))


def test_model_is_a_small_untied_fp32_llama() -> None:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, 0)
    assert 50_000 < flat(model).numel() < 300_000
    assert flat(model).dtype == torch.float32
    assert not model.config.tie_word_embeddings
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_labels_cover_the_answer_and_its_end() -> None:
    tokenizer = make_tokenizer()
    input_ids, labels = encode(tokenizer, [("1+2", "3"), ("sort 385", "358")])
    assert input_ids.shape == labels.shape == (2, 15)
    assert tokenizer.decode(labels[0][labels[0] != IGNORED]) == "3<eos>"
    assert tokenizer.decode(labels[1][labels[1] != IGNORED]) == "358<eos>"
    assert torch.equal(input_ids[labels != IGNORED], labels[labels != IGNORED])


def test_warm_start_of_one_seed_is_bitwise_equal() -> None:
    (first, first_loss), (second, second_loss) = short_warm_start(0), short_warm_start(0)
    assert first_loss == second_loss
    assert torch.equal(flat(first), flat(second))
    assert not torch.equal(flat(first), flat(short_warm_start(1)[0]))


def test_warm_start_lowers_the_loss_and_restores_the_threads() -> None:
    before = torch.get_num_threads()
    _, early = short_warm_start(0, steps=2)
    _, late = short_warm_start(0, steps=60)
    assert late < 0.7 * early
    assert torch.get_num_threads() == before


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def files(cache: Path) -> DemoFiles:
    return build_demo(cache, seed=0, settings=SHORT)


def test_build_writes_a_loadable_model_and_datasets(files: DemoFiles) -> None:
    model = AutoModelForCausalLM.from_pretrained(files.model_dir)
    tokenizer = AutoTokenizer.from_pretrained(files.model_dir)
    assert isinstance(model, LlamaForCausalLM)
    assert model.dtype == torch.float32
    assert tokenizer.chat_template
    assert pq.read_table(files.train_parquet).num_rows == 24
    assert pq.read_table(files.val_parquet).num_rows == 12


def test_reward_file_works_when_loaded_by_its_path(files: DemoFiles) -> None:
    spec = importlib.util.spec_from_file_location("demo_reward_by_path", files.reward_path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.compute_score("add", "3", "3") == 1.0


def test_second_build_reuses_the_files(files: DemoFiles, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start_module, "warm_start", lambda *_: pytest.fail("made again"))
    assert build_demo(cache, seed=0, settings=SHORT) == files


def test_other_seed_and_other_settings_get_other_files(files: DemoFiles, cache: Path) -> None:
    keys = {
        files.model_dir,
        build_demo(cache, seed=1, settings=SHORT).model_dir,
        build_demo(cache, seed=0, settings=replace(SHORT, train_per_domain=9)).model_dir,
    }
    assert len(keys) == 3


def test_failed_build_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> float:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(warm_start_module, "warm_start", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        build_demo(tmp_path, seed=0, settings=SHORT)
    assert list(tmp_path.iterdir()) == []


def test_build_that_loses_a_race_uses_the_winner(
    tmp_path: Path, files: DemoFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / files.model_dir.parent.name
    write = build._write

    def overtaken(folder: Path, seed: int, settings: DemoSettings) -> None:
        write(folder, seed, settings)
        home.mkdir()
        (home / "winner").touch()

    monkeypatch.setattr(build, "_write", overtaken)
    build_demo(tmp_path, seed=0, settings=SHORT)
    assert [path.name for path in tmp_path.iterdir()] == [home.name]
    assert (home / "winner").exists()


def test_build_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    build_demo(tmp_path, seed=0, settings=SHORT)
    assert capfd.readouterr() == ("", "")


def test_builds_of_one_seed_have_equal_files(files: DemoFiles, tmp_path: Path) -> None:
    again = build_demo(tmp_path, seed=0, settings=SHORT)
    for first, second in zip(sorted(files.model_dir.iterdir()), sorted(again.model_dir.iterdir()), strict=True):
        assert first.read_bytes() == second.read_bytes(), first.name
    assert pq.read_table(files.train_parquet) == pq.read_table(again.train_parquet)


def test_finding_what_is_there_loads_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from dataflex_verl.demo.build import DemoSettings, build_demo\n"
        "build_demo(sys.argv[1], seed=0, settings=DemoSettings(hidden=8))\n"
        "print('torch' in sys.modules)\n"
    )
    (tmp_path / f"demo-{build._content_key(0, DemoSettings(hidden=8))}").mkdir()
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
