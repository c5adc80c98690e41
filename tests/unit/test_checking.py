"""All stages' rules are asked, and problems get the place where the value was set."""

from tpu_train import checking
from tpu_train.config.compose import compose


def test_problems_of_all_stages_are_told_with_their_place() -> None:
    composed = compose(["training.grad_accumulation=3", "model.vocab_size=100", "model.head_dim=33"])
    told = [str(problem) for problem in checking.check(composed.run, composed.sources)]
    assert told[0].startswith("command line 'training.grad_accumulation=3': training.grad_accumulation is 3, which")
    assert told[1].startswith("command line 'model.head_dim=33': model.head_dim is 33")
    assert told[2].startswith("command line 'model.vocab_size=100': model.vocab_size")
    assert len(told) == 3


def test_problem_without_a_source_keeps_its_key() -> None:
    run = compose(["runtime.devices=2"]).run
    assert [problem.place for problem in checking.check(run)] == ["runtime.devices"]


def test_measures_are_those_of_the_design() -> None:
    found = checking.measure(compose(["model=llama3_8b"]).run)
    assert found == {
        "parameters": 8_030_261_248,
        "trainable_parameters": 8_030_261_248,
        "flops_per_token": 57_912_852_480,
        "flops_per_token_causal": 51_470_401_536,
        "seq_len": 8192,
        "global_batch_size": 8,
        "tokens_per_step": 8 * 8192,
    }
